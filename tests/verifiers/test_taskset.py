"""A taskset of verifiers v1, unchanged, drives a run: `make test-verifiers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.config.env import child_environment

pytestmark = pytest.mark.verifiers
HERE = Path(__file__).parent


@pytest.fixture
def python() -> str:
    found = os.environ.get("ASTRAFLOW_TEST_VERIFIERS", "")
    if not found:
        pytest.fail("ASTRAFLOW_TEST_VERIFIERS names no interpreter; run: make test-verifiers", pytrace=False)
    return found


def astraflow(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "astraflow", *words]
    return subprocess.run(
        command, cwd=HERE, env=child_environment(None), capture_output=True, text=True, timeout=400, check=False
    )  # fmt: skip


@pytest.mark.timeout(420)
def test_a_taskset_drives_a_run(python: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = astraflow("run", "sums.toml", f"--workflow.python={python}", f"--run.directory={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "report" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["accounting"]["trained"] >= 4, summary
    assert summary["accounting"]["dropped"].get("errors", 0) == 0, summary


def test_an_unknown_taskset_is_an_error_that_names_it(python: str, tmp_path: Path) -> None:
    done = astraflow(
        "try", "tiny-char", "--recipe", "sums.toml", f"--workflow.python={python}", "--workflow.taskset=no_such_tasks"
    )  # fmt: skip
    assert "no_such_tasks" in done.stdout + done.stderr
