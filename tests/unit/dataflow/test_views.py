"""What people and the report read."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from astraflow.dataflow.machine.commands import AckBatch, Event, MetricsRow
from astraflow.dataflow.views.lines import line_of
from astraflow.dataflow.views.nodes import PoolRates
from astraflow.dataflow.views.rows import MetricsFile
from astraflow.dataflow.views.status import status
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.dataflow import Desk, small_config
from astraflow.wire.messages import Ack


def test_a_row_is_written_once_also_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        file = MetricsFile(path, small_config())
        file.append(MetricsRow("step", "actor", 1, 2.0, {"reward/mean": 0.5}), {"nodes/count": 1.0})
        file.append(MetricsRow("eval", "", 1, 2.0, {"eval/success": 0.5}))
        file.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    expected = {"kind": "step", "policy": "actor", "step": 1, "time_s": 2.0, "nodes/count": 1.0, "reward/mean": 0.5}
    assert rows[0] == expected and len(rows) == 2


def test_what_rows_warn_of_is_logged_once_also_over_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        file = MetricsFile(tmp_path / "metrics.jsonl", small_config())
        file.append(MetricsRow("step", "actor", 1, 2.0, {"logprob_gap/p99": 0.9}))
        file.close()
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert record.getMessage().startswith("actor step 1: logprob_gap/p99=0.9 is above") and "(gap)" in caplog.text


def test_a_metric_does_not_hide_which_row_it_is_of(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", small_config())
    named = {"kind": 1.0, "policy": 2.0, "step": 3.0, "time_s": 4.0, "loss": 5.0}
    file.append(MetricsRow("step", "actor", 1, 2.0, named))
    file.close()
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row == {"kind": "step", "policy": "actor", "step": 1, "time_s": 2.0, "loss": 5.0}


def test_a_metric_does_not_hide_which_step_an_event_is_of() -> None:
    desk = Desk(small_config())
    desk.start()
    desk.play(4)
    assert desk.take(0) is not None
    ack = Ack(trainer_id="t", version=1, metrics={"step": 7.0, "policy": 8.0})
    desk.do(AckBatch("actor", "actor/1", ack))
    (event,) = (x for x in desk.instructions if isinstance(x, Event) and x.kind == "step")
    assert (event.fields["step"], event.fields["policy"]) == (1, "actor")


def test_a_row_that_cannot_be_written_waits_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, written = tmp_path / "metrics.jsonl", os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, data[: len(data) - 10])

    file = MetricsFile(path, small_config())
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        file.append(MetricsRow("step", "actor", 1, 2.0, {"reward/mean": 0.5}))
        assert (file.num_waiting, file.num_failures) == (1, 1)
        assert f"metrics={path} cannot be written (No space left on device), 1 rows wait" in caplog.text
    file.append(MetricsRow("step", "actor", 2, 3.0, {}))
    file.close()
    assert [row["step"] for row in read_jsonl(path)] == [1, 2] and file.num_waiting == 0


def test_an_event_is_one_short_line() -> None:
    desk = Desk(small_config(evaluation={"source": "held", "num_tasks": 1, "samples": 1}))
    desk.start()
    desk.commit(desk.lease(1), [1.0])
    while len(desk.machine.state.policies["actor"].queue) < 2:
        desk.play(2)
    desk.step(0)
    lines = [line_of(i) for i in desk.instructions if isinstance(i, Event)]
    assert "node_joined node_id=n name=n" in lines
    assert [x for x in lines if x.startswith("step ")] == [
        "step policy=actor step=1 reward=0.5 success=0.5 staleness=0 dropped=0 in_flight=0 queue=0"
    ]
    assert [x for x in lines if x.startswith("eval ")] == ["eval version=0 success=1 reward=1 tasks=1 wall_s=0"]


def test_rates_of_the_pool_come_from_what_nodes_report() -> None:
    desk = Desk(small_config())
    desk.start("a", "b")
    live, rates = desk.machine.live, PoolRates()
    for node_id in ("a", "b"):
        live.hear_node(node_id, 0.0).stats = {
            "uptime_s": 5.0, "busy_s": 10.0, "sampled_tokens": 100.0, "running": 2.0
        }  # fmt: skip
    first = rates.read(live)
    assert first["nodes/count"] == 2 and first["nodes/running"] == 4
    assert "nodes/idle_fraction" not in first, "one report says nothing about a rate"
    live.nodes["a"].stats = {"uptime_s": 15.0, "busy_s": 15.0, "sampled_tokens": 300.0, "running": 1.0}
    live.nodes["b"].stats = {"uptime_s": 7.0, "busy_s": 11.0, "sampled_tokens": 110.0, "running": 0.0}
    for _ in range(2):  # however often it is read between two reports
        metrics = rates.read(live)
        assert metrics["nodes/tokens_per_s"] == pytest.approx(20.0 + 5.0)
        assert metrics["nodes/idle_fraction"] == pytest.approx(1 - (0.5 + 0.5) / 2)
    live.nodes["a"].stats = {"uptime_s": 1.0, "busy_s": 0.0, "sampled_tokens": 0.0, "running": 0.0}
    assert rates.read(live)["nodes/tokens_per_s"] == pytest.approx(5.0), "a clock that starts again gives no rate"


def test_status_names_what_a_person_asks_for() -> None:
    desk = Desk(small_config(evaluation={"source": "held"}))
    desk.start()
    desk.lease(4)
    shown = status(desk.machine, 1.5)
    assert shown["time_s"] == 1.5 and not shown["finished"] and shown["failure"] is None
    assert shown["policies"]["actor"]["gate"] == {"in_flight": 1, "limit": 4}
    assert shown["episodes"]["leased"] == 4
    assert shown["nodes"][0]["name"] == "n" and shown["nodes"][0]["leased"] == 4
    assert shown["evaluation"]["open"] == [{"version": 0, "done": 0, "of": 3}]
    assert shown["accounting"] == {"admitted": 1, "trained": 0, "dropped": {}, "in_flight": 1}
    assert shown["sources"]["train"]["epoch"] == 0 and shown["sources"]["train"]["position"] == 1
