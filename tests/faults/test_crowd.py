"""Many runs on one host at the same moment, none of which has a model in the cache yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.runs import LaunchedRun

RUNS = 8


@pytest.mark.faults
@pytest.mark.timeout(420)
def test_eight_runs_start_at_once_without_a_clash(tmp_path: Path) -> None:
    words = (
        "--run.steps=2", "--workflow.group_size=4", "--policies.actor.batch.groups=4",
        "--policies.actor.warm_start.steps=5", "--policies.actor.operators=['keep_all']", "--evaluation.num_tasks=2",
    )  # fmt: skip
    cache = {"ASTRAFLOW_CACHE": str(tmp_path / "cache")}
    runs = [LaunchedRun.start(tmp_path, "quickstart", *words, name=f"run{i}", environment=cache) for i in range(RUNS)]
    try:
        for run in runs:
            assert run.wait(360.0) == 0, run.words()
    finally:
        for run in runs:
            run.end()
    for run in runs:
        assert [row["step"] for row in run.metrics() if row["kind"] == "step"] == [1, 2]
        assert run.summary()["accounting"]["trained"] == 8
