"""What `astraflow init` makes learns: a shorter run of each project, as a user would start it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.config.env import child_environment
from astraflow.observe.jsonl import read_jsonl
from astraflow.scaffold.project import KINDS, create
from astraflow.testing.runs import astraflow_command

ROOT = Path(__file__).parents[2]
STEPS, ENDS = 24, 4


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_learns_from_its_folder(kind: str, tmp_path: Path) -> None:
    create(tmp_path / "mine", kind)
    done = subprocess.run(
        astraflow_command("run", "run.toml", f"--run.steps={STEPS}", "--evaluation=none"), cwd=tmp_path / "mine",
        env=child_environment(None, {"PYTHONPATH": str(ROOT / "src")}), capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(tmp_path / "mine" / "runs" / "mine" / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows if row["kind"] == "step" and row["policy"] == "actor"]
    assert len(rewards) == STEPS
    assert mean(rewards[-ENDS:]) > mean(rewards[:ENDS]) + 0.1, rewards
