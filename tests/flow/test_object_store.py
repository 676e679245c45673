"""A whole run whose node reaches the trainer's weights neither as files nor over HTTP, only in an object store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.testing.weights import same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.objects.bucket import Bucket
from astraflow.weights.objects.layout import INDEX, read_index, store_url
from astraflow.weights.store import FileStore

STEPS = 4


@pytest.mark.flow
@pytest.mark.slow
def test_a_node_that_reaches_only_the_object_store_trains_along(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_SHARED_MEMORY", "0")  # as on another host: files of the trainer are not used
    bucket = tmp_path / "bucket"
    ended = run(
        tmp_path, "quickstart", f"--run.steps={STEPS}", "--workflow.group_size=4", "--policies.actor.batch.groups=6",
        "--policies.actor.warm_start.steps=20", "--evaluation.num_tasks=8", "--dataflow.heartbeat_s=0.2",
        f"--weights.url={bucket.as_uri()}", "--weights.announce=http://127.0.0.1:9", "--weights.keep=2",
    )  # fmt: skip
    assert ended.code == 0, ended.words()
    rows = ended.steps()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["weights/mirror_failures"] == 0
    (place,) = bucket.iterdir()
    base = f"{place.as_uri()}/actor"
    index = read_index(Bucket(base).get(INDEX), "")
    assert index.newest == STEPS
    assert 0 in {info.version for info in index.infos}  # pinned: what a warm start made
    client = WeightClient()
    monkeypatch.delenv("ASTRAFLOW_SHARED_MEMORY")
    fetched = client.fetch(WeightVersion("actor", STEPS, (store_url(base, index.store),)))
    assert same_bits(fetched.tensors, FileStore(ended.directory / "weights", "actor").fetch(STEPS))
    client.close()
