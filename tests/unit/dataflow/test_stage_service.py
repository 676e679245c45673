"""Stages over HTTP: the rows that a worker gets, and every wrong thing that it may send back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.testing.dataflow import check_law, episode, policy_section, small_config, trajectory
from astraflow.testing.stages import EchoStage
from astraflow.wire import messages as m

Serve = Callable[..., Any]
ECHO = {"type": "astraflow.testing.stages:EchoStage", "max_attempts": 9}
SUM = {"type": "astraflow.testing.stages:EchoSumStage"}
REWARD = {"type": "astraflow.testing.stages:LengthReward"}


def play(client: DataflowClient, n: int = 2, reward: bool = True) -> None:
    """Episodes of two branches each, the second longer."""
    for i, lease in enumerate(client.lease("n", n).leases):
        value = float(int(lease.episode_id[-1]) % 2) if reward else None
        rows = [trajectory(value, marker=10 * i), trajectory(value, branch=1, tokens=5 + i, marker=50 + i)]
        client.commit([episode(lease, "n", trajectories=rows)])


def header_of(rows: m.StageRows, **changes: Any) -> m.ColumnsHeader:
    fields = {
        "worker_id": "w",
        "request_id": "p",
        "leases": [(x.entry_id, x.attempt) for x in rows.leases],
        "row_ids": rows.row_ids,
    }
    return m.ColumnsHeader(**(fields | changes))


def test_columns_travel_from_the_worker_to_the_batch(serve: Serve) -> None:
    service = serve(small_config(policies__actor=policy_section(1, 0), stages={"echo": ECHO, "sum": SUM}))
    client = service.start()
    play(client)
    rows, table = client.stage_lease("echo", "w", 10)
    assert table.column_names == ["token_ids"] and table.num_rows == 4 == len(rows.row_ids)
    assert [x.num_rows for x in rows.leases] == [2, 2] and rows.leases[0].fields is None
    assert rows.row_ids[:2] == [f"{rows.leases[0].entry_id}:{i}" for i in range(2)]
    answer = client.stage_columns("echo", header_of(rows), EchoStage().run(table))
    assert set(answer.values()) == {"accepted"}
    rows, table = client.stage_lease("sum", "w", 10)
    assert table.column_names == ["echo"]
    sums = pa.table({"echo_sum": pa.array([sum(x) for x in table.column("echo").to_pylist()], pa.float32())})
    client.stage_columns("sum", header_of(rows), sums)
    got = client.batch("actor", "t", 0, wait_s=5)
    assert got is not None
    for row in got[1].to_pylist():
        assert row["echo"] == [float(i) for i in row["token_ids"]] and row["echo_sum"] == sum(row["token_ids"])
    service.call(lambda: check_law(service.shell.machine))


def test_the_reward_of_a_stage_is_the_reward_of_the_batch(serve: Serve) -> None:
    client = serve(small_config(policies__actor=policy_section(1, 0), stages={"judge": REWARD})).start()
    play(client, reward=False)
    rows, table = client.stage_lease("judge", "w", 10)
    assert table.column_names == ["loss_mask"] and all(x.fields and "question" in x.fields for x in rows.leases)
    rewards = [0.25, None, None, 0.75]  # the first that is scored holds for the episode
    client.stage_columns("judge", header_of(rows), pa.table({"reward": pa.array(rewards, pa.float32())}))
    got = client.batch("actor", "t", 0, wait_s=5)
    assert got is not None and sorted(r for r in got[1].column("reward").to_pylist() if r is not None) == [0.25, 0.75]
    assert got[0].metrics["reward/mean"] == 0.5


def test_what_is_wrong_with_the_whole_refuses_all_of_it_by_name(serve: Serve) -> None:
    service = serve(small_config(stages={"echo": ECHO}))
    client = service.start()
    play(client)
    ids: list[str] = []

    def refused(change: Callable[[m.StageRows, pa.Table], tuple[m.ColumnsHeader, pa.Table]], reason: str) -> str:
        rows, table = client.stage_lease("echo", "w", 10)
        ids[:] = rows.row_ids
        with pytest.raises(WireError) as caught:
            client.stage_columns("echo", *change(rows, table))
        assert caught.value.status == 422
        state = service.call(lambda: service.shell.machine.state.stages["echo"])
        assert state.refused[reason] >= 2 and len(state.pending) == 2, "the rows are offered again"
        service.call(lambda: check_law(service.shell.machine))
        return str(caught.value)

    def wrong(kind: str) -> Callable[[m.StageRows, pa.Table], tuple[m.ColumnsHeader, pa.Table]]:
        return lambda rows, table: (header_of(rows, request_id=kind), EchoStage(wrong=kind).run(table))

    assert "must hold 'echo' once" in refused(wrong("missing"), "column")
    assert "columns=more is not added by this stage (echo)" in refused(wrong("extra"), "column")
    text = refused(wrong("dtype"), "dtype")
    assert "columns.echo=list<item: double> must be list<item: float>" in text
    assert "4 rows are named, but 3 rows came" in refused(wrong("rows"), "rows")
    swapped = refused(
        lambda r, t: (header_of(r, request_id="s", row_ids=[r.row_ids[1], r.row_ids[0], *r.row_ids[2:]]),
                      EchoStage().run(t)), "rows"
    )  # fmt: skip
    assert f"row_ids[0]={ids[1]} must be {ids[0]}" in swapped
    other = refused(
        lambda r, t: (header_of(r, request_id="o", row_ids=[*r.row_ids[:3], "actor/train/9/9/9:0"]),
                      EchoStage().run(t)), "rows"
    )  # fmt: skip
    assert "row_ids[3]=actor/train/9/9/9:0 must be" in other
    assert service.call(lambda: service.shell.machine.state.stages["echo"].num_lost) == 12


def test_a_wrong_value_refuses_its_entry_and_no_other(serve: Serve) -> None:
    service = serve(small_config(stages={"echo": ECHO, "judge": REWARD}))
    client = service.start()
    play(client)
    rows, _ = client.stage_lease("judge", "w", 10)
    bad = pa.table({"reward": pa.array([0.5, float("inf"), 1.0, None], pa.float32())})
    answers = client.stage_columns("judge", header_of(rows), bad)
    first, second = answers.values()
    assert second == "accepted"
    assert first.startswith("refused: stages.judge.columns.reward=inf must be a finite number in row actor/train/0/")
    assert "(number 1); null is unscored" in first
    rows, table = client.stage_lease("judge", "w", 10)
    assert [x.attempt for x in rows.leases] == [2] and table.num_rows == 2
    client.stage_columns("judge", header_of(rows, request_id="q"), pa.table({"reward": pa.array([0, 0], pa.float32())}))
    for wrong, words in (
        ("nan", "columns.echo=nan must be a finite"),
        ("length", "columns.echo=3 must have 4 entries"),
    ):
        rows, table = client.stage_lease("echo", "w", 10)
        results = client.stage_columns("echo", header_of(rows, request_id=wrong), EchoStage(wrong=wrong).run(table))
        assert words in results[rows.leases[0].entry_id], results
    state = service.call(lambda: service.shell.machine.state.stages["echo"])
    assert state.refused["not_finite"] == 1 and state.refused["length"] >= 1
    service.call(lambda: check_law(service.shell.machine))


def test_nulls_are_wrong_everywhere_but_in_a_reward(serve: Serve) -> None:
    client = serve(small_config(stages={"echo": ECHO})).start()
    play(client)
    rows, _ = client.stage_lease("echo", "w", 10)
    column = pa.array([None, [1.0] * 5, [1.0, None, 1.0, 1.0], [1.0] * 6], pa.list_(pa.float32()))
    first, second = client.stage_columns("echo", header_of(rows), pa.table({"echo": column})).values()
    assert "columns.echo=null must have 4 entries" in first and "columns.echo=None must be a finite number" in second


def test_an_entry_that_failed_is_offered_again(serve: Serve) -> None:
    client = serve(small_config(stages={"echo": ECHO})).start()
    play(client)
    rows, table = client.stage_lease("echo", "w", 10)
    one, two = rows.leases
    header = header_of(
        rows, leases=[(one.entry_id, 1)], row_ids=rows.row_ids[:2], failed=[(two.entry_id, 1, "out of memory")]
    )
    answers = client.stage_columns("echo", header, EchoStage().run(table.slice(0, 2)))
    assert answers == {one.entry_id: "accepted", two.entry_id: "refused: out of memory"}
    assert client.stage_columns("echo", header, EchoStage().run(table.slice(0, 2))) == answers
    rows, _ = client.stage_lease("echo", "w", 10)
    assert [(x.entry_id, x.attempt) for x in rows.leases] == [(two.entry_id, 2)]


def test_garbage_and_unknown_names_are_refused_and_the_service_goes_on(serve: Serve) -> None:
    client = serve(small_config(stages={"echo": ECHO})).start()
    play(client)
    rows, table = client.stage_lease("echo", "w", 10)
    for call in (
        lambda: client.stage_lease("judge", "w", 1),
        lambda: client.stage_columns("judge", header_of(rows), table),
        lambda: client.stage_leave("judge", "w"),
    ):
        with pytest.raises(WireError, match="stage=judge is not a stage of this run; known: echo"):
            call()
    with pytest.raises(WireError, match="must be a ColumnsHeader"):
        client.stage_columns("echo", m.Ok(), table)  # type: ignore[arg-type]
    strange = header_of(rows, leases=[("no such entry", 1)], row_ids=["no such entry:0"])
    answers = client.stage_columns("echo", strange, pa.table({"echo": pa.array([[1.0]], pa.list_(pa.float32()))}))
    assert "does not wait for stages" in answers["no such entry"]
    twice = header_of(rows, request_id="t", leases=[(rows.leases[0].entry_id, 1)] * 2)
    with pytest.raises(WireError, match="must name each entry once"):
        client.stage_columns("echo", twice, EchoStage().run(table))
    assert client.stage_lease("echo", "w", 10)[0].leases


def test_a_lease_waits_for_rows_and_a_worker_may_leave(serve: Serve) -> None:
    service = serve(small_config(stages={"echo": ECHO}))
    client, other = service.start(), service.client()
    rows, table = client.stage_lease("echo", "w", 10)
    assert rows.leases == [] and table.num_rows == 0 and table.column_names == ["token_ids"] and rows.lease_s == 60.0
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.stage_lease, "echo", "v", 1, wait_s=20)
        play(client)
        assert len(waiting.result(60)[0].leases) == 1
    client.stage_leave("echo", "v")
    assert len(client.stage_lease("echo", "w", 10)[0].leases) == 2


def test_rows_survive_a_restart_with_the_leases(serve: Serve, tmp_path: Any) -> None:
    config = small_config(policies__actor=policy_section(1, 0), stages={"echo": ECHO, "sum": SUM})
    service = serve(config)
    client = service.start()
    play(client)
    rows, table = client.stage_lease("echo", "w", 10)
    client.stage_columns("echo", header_of(rows), EchoStage().run(table))
    rows, _ = client.stage_lease("sum", "w", 10, request_id="r")
    service.close()
    service = serve(config)
    client = service.client()
    again, table = client.stage_lease("sum", "w", 10, request_id="r")
    assert again.leases == rows.leases and table.column("echo").null_count == 0
    sums = pa.table({"echo_sum": pa.array(np.zeros(4), pa.float32())})
    assert set(client.stage_columns("sum", header_of(again), sums).values()) == {"accepted"}
    service.call(lambda: check_law(service.shell.machine))


def test_columns_of_workers_with_other_arrow_schemas_are_put_together(serve: Serve) -> None:
    stages = {"echo": ECHO, "sum": SUM}
    client = serve(small_config(policies__actor=policy_section(1, 0), stages=stages)).start()
    play(client)
    kinds = [pa.list_(pa.float32()), pa.large_list(pa.float32())]
    for i, kind in enumerate(kinds):
        rows, table = client.stage_lease("echo", "w", 1)
        column = EchoStage().run(table).column("echo").cast(kind)
        columns = pa.Table.from_arrays([column], schema=pa.schema([pa.field("echo", kind, nullable=i > 0)]))
        answer = client.stage_columns("echo", header_of(rows, request_id=f"p{i}"), columns)
        assert set(answer.values()) == {"accepted"}
    rows, table = client.stage_lease("sum", "w", 10)
    assert table.num_rows == 4 and table.column("echo").type == kinds[0]
