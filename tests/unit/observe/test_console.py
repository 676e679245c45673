from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from astraflow.observe import console as module
from astraflow.observe.console import RunDisplay, progress_display, waiting_line
from astraflow.observe.health.window import Limits
from astraflow.testing.dataflow import small_config

STEP = {
    "kind": "step", "policy": "actor", "step": 3, "time_s": 75.0, "reward/mean": 0.25, "success/mean": 0.125,
    "staleness/mean": 1.5, "queue/groups": 2.0, "nodes/tokens_per_s": 12345.6, "nodes/idle_fraction": 0.2,
    "perf/idle_fraction": 0.4, "logprob_gap/p99": 1.2e-5, "nodes/count": 2.0,
}  # fmt: skip
EVAL = {
    "kind": "eval", "policy": "", "step": 3, "time_s": 76.0, "eval/success": 0.5, "eval/avg@4/low": 0.25,
    "eval/avg@4/high": 0.75, "eval/num_tasks": 40.0,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "policies": {"actor": {"version": 3, "queue": 2, "gate": {"in_flight": 7, "limit": 32}}},
    "nodes": [{"name": "node0", "leased": 60, "capacity": 64, "versions": {"actor": 3}, "silent_s": 9.0}],
    "accounting": {"admitted": 20, "trained": 12, "dropped": {"zero_variance": 1}, "in_flight": 7},
    "sources": {"train": {"admitted": 20, "skipped": {"greso": 4}}, "other": {"admitted": 0, "skipped": {}}},
    "evaluation": {"open": [{"version": 3, "done": 10, "of": 40}]},
}


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=300, soft_wrap=True), out


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path: Path) -> None:
    console, out = plain()
    path = tmp_path / "metrics.jsonl"
    with RunDisplay("demo", 60, path, console) as display:
        display.update(STATUS)
        path.write_text(json.dumps(STEP) + "\n")
        display.update(STATUS)
        with path.open("a") as file:
            file.write(json.dumps(EVAL) + "\n")
    assert out.getvalue().splitlines() == [
        "[01:15] actor step 3/60  reward 0.250  success 0.125  staleness 1.50  queue 2  tok/s 12,346  gap 1.2e-05  "
        "idle node 20%  trainer 40%  nodes 2",
        "held-out at version 3: success 0.500 [0.250, 0.750] (40 tasks)",
    ]


def test_the_time_that_is_left_is_told_from_the_newest_steps() -> None:
    """A slow first step counts no more after twenty others."""
    console, out = plain()
    with RunDisplay("demo", 60, None, console) as display:
        for step in range(1, 31):
            display.row({"kind": "step", "policy": "actor", "step": step, "time_s": 500.0 + 10.0 * step})
            display.row({"kind": "step", "policy": "critic", "step": step, "time_s": (step > 1) * 500.0 + 2.0 * step})
    lines = out.getvalue().splitlines()
    assert ["left" in line for line in lines[:6]] == [False] * 4 + [True] * 2
    assert lines[-2].endswith("left 05:00") and lines[-1].endswith("left 01:00")


def test_notes_stay(tmp_path: Path) -> None:
    console, out = plain()
    with RunDisplay("demo", 60, None, console) as display:
        display.note("node0 ended with SIGKILL [9]")
    assert out.getvalue() == "node0 ended with SIGKILL [9]\n"


def test_a_long_wait_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", -1.0)
    console, out = plain()
    with RunDisplay("demo", 60, None, console) as display:
        display.update(STATUS)
        display.update({**STATUS, "nodes": [{"stats": {"swarm/clients": 0.0}}, {"stats": {"swarm/clients": 2.0}}]})
        display.update({})
    first, swarm, second = out.getvalue().splitlines()
    assert first.endswith("actor waits for step 4: 2 groups are complete, 7 of 32 in flight; 1 nodes")
    assert swarm.endswith("; 2 nodes with 2 swarm clients")
    idle = [{"capacity": 0}, {"capacity": 0}]
    assert waiting_line({"nodes": idle}, 1.0).endswith("; 2 nodes, none of which plays (workers = 0)")
    assert waiting_line({"nodes": [*idle, {"capacity": 8}]}, 1.0).endswith("; 3 nodes")
    assert "the run starts" in second
    waits = waiting_line({"policies": {"actor": {"version": -1}}, "nodes": [{"capacity": 8}]}, 1.0)
    assert waits.endswith("actor has no weights yet: its trainer loads the model, or shows it demonstrations; 1 nodes")


def test_the_first_failed_episode_of_each_kind_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = plain()
    failed = {"errors": {"workflow": 2}, "first_errors": {"workflow": "KeyError: 'question'"}}
    with RunDisplay("demo", 60, None, console) as display:
        display.update({**STATUS, "episodes": failed})
        display.update({**STATUS, "episodes": {**failed, "errors": {"workflow": 9}}})
        monkeypatch.setattr(module, "QUIET_S", -1.0)
        display.update({**STATUS, "episodes": {**failed, "errors": {"workflow": 10, "timeout": 1}}})
    first, waits = out.getvalue().splitlines()
    assert first == "an episode failed (the first of its kind), workflow: KeyError: 'question'"
    assert waits.endswith("1 nodes; 11 episodes failed so far")


def test_a_terminal_gets_a_live_panel(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=150)
    path = tmp_path / "metrics.jsonl"
    before = [STEP | {"step": step, "time_s": 25.0 * step} for step in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*before, STEP, EVAL]))
    with RunDisplay("demo", 60, path, console) as display:
        display.update(STATUS)
        display.note("node0 starts again")
    text = out.getvalue()
    for part in (
        "demo", "step 3/60", "left 23:45", "reward 0.250", "held-out at version 3",
        "node0: plays 60 of 64  actor v3  silent for 9 s",
        "20 admitted, 12 trained, 7 in flight; dropped: zero_variance 1", "source train: 20 admitted; skipped: greso 4",
        "evaluation of version 3: 10 of 40 tasks",
        "node0 starts again",
    ):  # fmt: skip
        assert part in text


def test_a_narrow_terminal_loses_nothing_of_the_panel(tmp_path: Path) -> None:
    out = io.StringIO()
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(STEP) + "\n")
    console = Console(file=out, force_terminal=True, width=40, height=40, soft_wrap=True)
    with RunDisplay("demo", 60, path, console) as display:
        display.update(STATUS)
    shown = " ".join(out.getvalue().split())
    for part in ("step 3/60", "idle node 20%", "trainer 40%", "7 in flight", "zero_variance 1"):
        assert part in shown
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()) <= 40


@pytest.mark.parametrize("row", [{}, {"kind": "eval"}, {"kind": "step", "reward/mean": None, "policy": "a", "step": 1}])
def test_missing_metrics_are_left_out(row: dict[str, Any]) -> None:
    console, out = plain()
    with RunDisplay("demo", 60, None, console) as display:
        display.row(row)
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_what_rows_warn_of_is_said_beside_them(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=300, soft_wrap=True)
    with RunDisplay("demo", 60, None, console, Limits.of(small_config())) as display:
        display.row({**STEP, "logprob_gap/p99": 0.9})
        display.row({**STEP, "step": 4, "logprob_gap/p99": 0.9})
    assert out.getvalue().count("warning, actor step 3: logprob_gap/p99=0.9 is above trainer.max_logprob_gap") == 1


def test_the_last_status_is_kept_for_the_report() -> None:
    display = progress_display(small_config())
    with display:
        display.update(STATUS)
    assert display.status is STATUS
