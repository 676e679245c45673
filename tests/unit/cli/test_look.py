"""What `astraflow status` says of a run, however it ended."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from astraflow.cli.app import main
from astraflow.cli.look import lines_of
from astraflow.cli.run import open_run
from astraflow.config.load import resolved_json
from astraflow.launch.rundir import write_ready
from astraflow.wire.app import bind
from command_line import failing


def test_status_of_what_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "holds no run" in failing(["status", str(tmp_path)], capsys, 1)
    assert "gave no answer" in failing(["status", "http://127.0.0.1:9"], capsys, 1)


def test_status_of_a_run_that_ended_is_its_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.resolved.json").write_text(resolved_json(open_run("quickstart", [])))
    assert "made no step" in failing(["status", str(tmp_path)], capsys, 1)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "summary.json").write_text(
        json.dumps({"steps": 3, "reward": {"start": 0.123456, "end": 1.0}})
    )
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["steps: 3", "reward:", "  start: 0.1235", "  end: 1"]


@pytest.mark.parametrize(("steps", "state"), [(3, "finished"), (4, "ended at step 3 of 4; go on with it by --resume")])
def test_status_of_a_run_by_hand_that_ended_is_what_it_wrote(
    steps: int, state: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = open_run("quickstart", [f"--run.steps={steps}"])
    (tmp_path / "run.resolved.json").write_text(resolved_json(config))
    rows = [{"kind": "step", "policy": "actor", "step": step, "reward/mean": 0.5} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_ready(tmp_path / "dataflow" / "ready.json", "http://127.0.0.1:9")
    assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"state: {state}" in lines and "steps: 3" in lines
    assert f"report: astraflow report {tmp_path} writes it" in lines


def test_status_of_a_run_whose_service_was_killed_asks_nobody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another service may listen there now: its status would be shown, and it would get our token."""
    (tmp_path / "run.resolved.json").write_text(resolved_json(open_run("quickstart", [])))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "policy": "actor", "step": 1}\n')
    with closing(bind("127.0.0.1", 0, "test")) as other:
        other.settimeout(0)
        write_ready(tmp_path / "dataflow" / "ready.json", f"http://127.0.0.1:{other.getsockname()[1]}")
        assert main(["status", str(tmp_path)]) == 0
        with pytest.raises(BlockingIOError):
            other.accept()
    assert "ended at step 1" in capsys.readouterr().out


def test_lines_of_nested_facts() -> None:
    assert lines_of({"a": {"b": 1}, "c": {}, "d": [1]}) == ["a:", "  b: 1", "c: {}", "d: [1]"]
