from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.config.load import check_run, resolved_json
from astraflow.launch import report as module
from astraflow.launch.report import terminal_curve, write_report
from astraflow.models.checkpoints import STATE, StateFile

PNG = b"\x89PNG"


def write_rows(run_dir: Path, num_steps: int = 12) -> None:
    rows: list[dict[str, Any]] = []
    for n in range(1, num_steps + 1):
        if n % 5 == 1:
            rows.append(
                {"kind": "eval", "policy": "", "step": n - 1, "time_s": 5.0 * n, "eval/success": n / 20,
                 "eval/avg@1/low": 0.0, "eval/avg@1/high": 0.875,
                 "eval/reward": n / 15, "eval/num_tasks": 50.0, "eval/min_version": n - 1.0,
                 "eval/max_version": n - 1.0}
            )  # fmt: skip
        rows.append(
            {"kind": "step", "policy": "actor", "step": n, "time_s": 5.0 * n, "reward/mean": n / 20,
             "success/mean": n / 30, "staleness/count/0": 10.0, "staleness/count/1": 30.0, "logprob_gap/p50": 1e-6,
             "logprob_gap/p99": 1e-5, "logprob_gap/max": 2e-5, "perf/wait_s": 1.0, "perf/busy_s": 3.0,
             "nodes/idle_fraction": 0.1, "groups/admitted": 20.0 * n, "groups/trained": 16.0 * n,
             "groups/dropped/zero_variance": 3.0 * n, "groups/in_flight": 1.0 * n,
             "sources/train/skipped/greso": 2.0 * n}
        )  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(run_dir: Path) -> None:
    config = check_run(
        {
            "run": {"name": "demo", "steps": 12, "description": "A demonstration."},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "tool_use", "environment": "calculator"},
            "policies": {"actor": {"model": "tiny-char", "batch": {"groups": 16, "max_staleness": 1}}},
        },
        "here",
    )
    (run_dir / "run.resolved.json").write_text(resolved_json(config))


def write_checkpoint(place: Path) -> None:
    (place / STATE).mkdir(parents=True)
    head = StateFile(version=12, step=12, skipped=0, skipped_in_a_row=0, audit_versions=[], files={})
    (place / STATE / "state.json").write_bytes(msgspec.json.encode(head))


def test_a_finished_run_leaves_everything(tmp_path: Path) -> None:
    write_rows(tmp_path)
    write_config(tmp_path)
    write_checkpoint(tmp_path / "checkpoints" / "actor" / "step-000012")
    status = {"time_s": 61.0, "accounting": {"admitted": 240, "trained": 192, "dropped": {"stale": 48}, "in_flight": 0}}
    report = write_report(tmp_path, status)
    assert report == tmp_path / "report"
    summary = json.loads((report / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["accounting"] == status["accounting"]
    assert summary["wall_s"] == 61.0
    assert (report / "curves.png").read_bytes().startswith(PNG)
    assert (report / "staleness.png").read_bytes().startswith(PNG)
    page = (report / "summary.md").read_text()
    for part in (
        "# Run demo", "A demonstration.", "success (held-out)", "curves.png", "staleness.png", "| node idle | 10.0% |",
        "| trainer idle | 25.0% |", "240 admitted = 192 trained + 48 dropped + 0 in flight: the law holds",
        "1e-06, 1e-05, 2e-05", "16 groups, max_staleness 1", "grpo, ppo_clip", "newest versions: actor 12", "75.0%",
        "| 0.05 [0, 0.875] |",
        "| skipped before they were admitted | train: greso 24 |", "| train sources | train: calculator |",
        "step-000012", f"astraflow try {tmp_path}",
    ):  # fmt: skip
        assert part in page, part
    assert terminal_curve([]) == ""


def test_the_report_can_be_written_again_without_a_status(tmp_path: Path) -> None:
    write_rows(tmp_path)
    account = {"admitted": 9, "trained": 8, "dropped": {}, "in_flight": 1}
    write_report(tmp_path, {"accounting": account})
    report = write_report(tmp_path)
    assert json.loads((report / "summary.json").read_text())["accounting"] == account


def test_rows_stand_in_when_there_was_no_status(tmp_path: Path) -> None:
    write_rows(tmp_path)
    page = (write_report(tmp_path) / "summary.md").read_text()
    assert "240 admitted = 192 trained + 36 dropped + 12 in flight: the law holds" in page


def test_errors_of_episodes_are_shown_with_the_first_message_of_each_kind(tmp_path: Path) -> None:
    write_rows(tmp_path)
    episodes = {
        "errors": {"timeout": 1, "overlong": 7},
        "first_errors": {"overlong": "prompt_tokens=600 must be\nbelow 512 | 513", "timeout": "longer than 5 s"},
    }
    report = write_report(tmp_path, {"episodes": episodes})
    page = (report / "summary.md").read_text()
    assert "| overlong | 7 | prompt_tokens=600 must be below 512 \\| 513 |\n| timeout | 1 | longer than 5 s |" in page
    assert json.loads((report / "summary.json").read_text())["errors"]["timeout"]["first"] == "longer than 5 s"


def test_who_sampled_what_is_shown_where_several_did(tmp_path: Path) -> None:
    row = {"kind": "step", "policy": "actor", "time_s": 5.0, "logprob_gap/local-float32/p99": 1e-6}
    rows = [row | {"step": step, "logprob_gap/local-bfloat16/p99": gap} for step, gap in enumerate((0.1, 0.3), 13)]
    write_rows(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    made = {"episodes": 4, "tokens": 30, "share": 0.75, "reward": 0.5}
    engines = {"local-float32@full": made, "local-bfloat16@half": made | {"share": 0.25, "reward": None}}
    report = write_report(tmp_path, {"episodes": {"engines": engines}})
    page = (report / "summary.md").read_text()
    assert "| local-float32@full | 4 | 30 | 75.0% | 0.5 | 1e-06 |" in page
    assert "| local-bfloat16@half | 4 | 30 | 25.0% | – | 0.3 |" in page
    assert json.loads((report / "summary.json").read_text())["engines"] == engines
    alone = write_report(tmp_path, {"episodes": {"engines": {"local-float32@full": made}}})
    assert "@full" not in (alone / "summary.md").read_text()


def test_a_broken_law_is_said_loudly(tmp_path: Path) -> None:
    write_rows(tmp_path)
    account = {"admitted": 9, "trained": 9, "dropped": {}, "in_flight": 1}
    page = (write_report(tmp_path, {"accounting": account}) / "summary.md").read_text()
    assert "the law DOES NOT HOLD" in page


def test_a_run_that_made_no_step_has_a_report(tmp_path: Path) -> None:
    report = write_report(tmp_path)
    page = (report / "summary.md").read_text()
    assert "0 steps" in page
    assert "No checkpoint was written" in page
    assert not (report / "curves.png").exists()


def test_torn_and_odd_rows_are_tolerated(tmp_path: Path) -> None:
    write_rows(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "reward/mean": null}\n{"kind": "alarm"}\n{"kind": "st')
    assert json.loads((write_report(tmp_path) / "summary.json").read_text())["steps"] == 4


def test_without_matplotlib_only_the_pictures_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    write_rows(tmp_path)
    report = write_report(tmp_path)
    assert (report / "summary.md").exists()
    assert not (report / "curves.png").exists()
    assert "astraflow[report]" in caplog.text
