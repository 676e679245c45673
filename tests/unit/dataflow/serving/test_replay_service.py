"""Replay over HTTP: rows that were trained before are served again, from the same bytes, also after a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from astraflow.dataflow.client import DataflowClient
from astraflow.testing.dataflow import episode, policy_section, small_config, trajectory
from astraflow.wire import messages as m

Serve = Callable[..., Any]


def config() -> Any:
    section = policy_section(4, 1, operators=["zero_variance", {"type": "replay", "ratio": 0.5, "max_age": 4}])
    return small_config(run__steps=8, policies={"actor": section | {"algorithm": {"loss": "m2po"}}})


def play(client: DataflowClient, version: int) -> None:
    while leases := client.lease("n", 64).leases:
        rewards = [float(int(x.episode_id[-1]) % 2) for x in leases]
        rows = [
            [trajectory(r, version, marker=100 * x.task.row + i)]
            for i, (x, r) in enumerate(zip(leases, rewards, strict=True))
        ]
        client.commit([episode(x, "n", trajectories=t) for x, t in zip(leases, rows, strict=True)])


def train(client: DataflowClient, version: int, trainer: str = "t") -> pa.Table:
    got = client.batch("actor", trainer, version, wait_s=5)
    assert got is not None
    client.ack(got[0], trainer)
    return got[1].sort_by("episode_id")


def test_replayed_rows_are_those_of_their_first_time_and_a_crash_changes_no_batch(serve: Serve, tmp_path: Path) -> None:
    service = serve(config())
    client = service.start()
    served = []
    for version in range(6):
        play(client, version)
        served.append(train(client, version))
        client.checkpoint("actor", "t", min(version, 2))
    first: dict[str, dict[str, Any]] = {}
    again = 0
    for table in served:
        for row in table.to_pylist():
            again += row["episode_id"] in first
            assert first.setdefault(row["episode_id"], row) == row
    assert again, "nothing was replayed"
    accounting = client.status()["policies"]["actor"]
    assert accounting["accounting"]["trained"] * 2 + again == 48
    service.close()

    client = serve(config()).client()
    client.resume("actor", m.Resume(trainer_id="t2", version=2, urls=("file:///w",), run_id=client.run().run_id))
    assert [train(client, version, "t2") for version in range(2, 6)] == served[2:]
    assert client.status()["policies"]["actor"]["replay"] == accounting["replay"]
