"""A taskset of verifiers v1, unchanged, drives a run: `make test-verifiers`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from astraflow.testing.runs import LaunchedRun

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(420)]
HERE = Path(__file__).parent


@pytest.fixture
def python() -> str:
    found = os.environ.get("ASTRAFLOW_TEST_VERIFIERS", "")
    if not found:
        pytest.fail("ASTRAFLOW_TEST_VERIFIERS names no interpreter; run: make test-verifiers", pytrace=False)
    return found


def started(place: Path, python: str, *words: str) -> LaunchedRun:
    here = {"PYTHONPATH": str(HERE)}
    return LaunchedRun.start(place, str(HERE / "sums.toml"), f"--workflow.python={python}", *words, environment=here)


def test_a_taskset_drives_a_run(python: str, tmp_path: Path) -> None:
    run = started(tmp_path, python)
    try:
        assert run.wait(400) == 0, run.words()
    finally:
        run.end()
    summary = run.summary()
    assert summary["accounting"]["trained"] == 4 and not summary["errors"], summary
