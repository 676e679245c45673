"""Whole runs of the shipped recipe as real processes: to the end, again, with more steps, synchronous, many at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.env import child_environment
from astraflow.testing.forked import popen
from astraflow.testing.runs import LaunchedRun, astraflow_command, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.slow]
SMALL = (
    "--workflow.group_size=4", "--policies.actor.batch.groups=6", "--policies.actor.warm_start.steps=20",
    "--evaluation.num_tasks=8", "--dataflow.heartbeat_s=0.5",
)  # fmt: skip
STEPS = 3


def _finish(run: LaunchedRun, limit_s: float = 300.0) -> None:
    assert run.wait(limit_s) == 0, run.words()


def _steps(run: LaunchedRun) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if row["kind"] == "step"]


def _law_holds(account: dict[str, Any]) -> bool:
    return bool(account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    """A run of the quickstart that came to its end."""
    run = LaunchedRun.start(tmp_path_factory.mktemp("runs"), "quickstart", *SMALL, f"--run.steps={STEPS}")
    try:
        _finish(run)
        yield run
    finally:
        run.end()


def test_a_run_leaves_metrics_a_report_and_a_checkpoint(finished: LaunchedRun) -> None:
    rows = _steps(finished)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness/max"] <= 1 and row["logprob_gap/p99"] < 1e-4 for row in rows)
    assert all(0.0 <= row["reward/mean"] <= 1.0 and row["tokens/sampled"] > 0 for row in rows)
    summary = finished.summary()
    assert summary["steps"] == STEPS
    assert summary["versions"] == {"actor": STEPS}
    assert _law_holds(summary["accounting"])
    assert summary["accounting"]["trained"] == STEPS * 6
    report = finished.directory / "report"
    assert {"summary.md", "curves.png"} <= {path.name for path in report.iterdir()}
    evaluated = [row["step"] for row in finished.metrics() if row["kind"] == "eval"]
    assert evaluated[0] == 0
    assert evaluated[-1] == STEPS


def test_its_checkpoint_is_a_hugging_face_model(finished: LaunchedRun) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = finished.directory / "checkpoints" / "actor" / f"step-{STEPS:06d}"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer("3*4?", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert model(input_ids=ids).logits.shape == (1, 4, model.config.vocab_size)


def test_a_run_directory_is_not_used_twice(finished: LaunchedRun) -> None:
    before = (finished.directory / "metrics.jsonl").read_bytes()
    again = LaunchedRun.start(finished.directory.parent, "quickstart", *SMALL, name=finished.directory.name)
    assert again.wait(300) != 0
    assert "already holds a run" in again.words()
    assert "--resume" in again.words()
    assert (finished.directory / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_goes_on_when_it_gets_more_steps(finished: LaunchedRun) -> None:
    more = (f"--run.steps={STEPS + 2}", "--resume")
    run = LaunchedRun.start(finished.directory.parent, "quickstart", *SMALL, *more, name=finished.directory.name)
    _finish(run)
    assert [row["step"] for row in _steps(run)] == list(range(1, STEPS + 3))
    assert _law_holds(run.summary()["accounting"])


def test_without_staleness_every_token_is_of_the_newest_version(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run(tmp_path, "quickstart", "--policies.actor.batch.max_staleness=0", "--run.steps=6", *SMALL)
    assert ended.code == 0, ended.words()
    rows = ended.steps()
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["staleness/max"] == 0 and row["staleness/fresh_tokens"] == 1.0 for row in rows)
    assert "stale" not in ended.summary()["accounting"]["dropped"]


def test_eight_data_services_start_at_once_without_a_clash(tmp_path: Path) -> None:
    ready = [tmp_path / f"{i}.json" for i in range(8)]
    with (tmp_path / "log").open("wb") as log:
        started = [
            popen(astraflow_command("dataflow", "quickstart", f"--run-dir={tmp_path / str(i)}", f"--ready-file={path}"),
                  stdout=log, env=child_environment(None))
            for i, path in enumerate(ready)
        ]  # fmt: skip
    try:
        wait_until(lambda: all(path.exists() for path in ready), "eight ready files", 300)
        assert len({json.loads(path.read_text())["url"] for path in ready}) == 8
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60.0) for process in started]
    assert codes == [0] * 8
