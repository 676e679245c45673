"""Every recipe of a data algorithm trains two steps as real processes, with its own operators, credit and stages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from astraflow.cli.run import open_run
from astraflow.config.env import child_environment
from astraflow.config.recipes import recipe_names
from astraflow.launch.claim import claim
from astraflow.launch.report import write_report
from astraflow.launch.supervisor import Supervisor
from astraflow.observe.console import progress_display
from astraflow.observe.jsonl import read_jsonl
from astraflow.observe.summary import law_holds
from astraflow.testing.forked import popen
from astraflow.testing.runs import astraflow_command

pytestmark = [pytest.mark.flow, pytest.mark.slow, pytest.mark.timeout(240)]
RECIPES = [name for name in recipe_names() if name.startswith("algo-")]
SMALL = (
    "--run.steps=2", "--policies.actor.batch.groups=4", "--policies.actor.warm_start.steps=1",
    "--policies.actor.warm_start.batch=1", "--policies.actor.warm_start.lr=1e-9", "--evaluation.num_tasks=2",
    "--dataflow.heartbeat_s=0.2",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after a warm start: a fresh one earns nothing, and groups of equal rewards are dropped."""
    path = tmp_path_factory.mktemp("model") / "warm"
    command = astraflow_command("sft", RECIPES[0], "--out", str(path), "--policies.actor.warm_start.steps=80")
    with path.with_suffix(".log").open("wb") as log:
        done = popen(command, env=child_environment(None), stdout=log)
    assert done.wait(120) == 0, path.with_suffix(".log").read_text()
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_data_algorithm_trains(name: str, model: Path, tmp_path: Path) -> None:
    config = open_run(name, [*SMALL, f"--policies.actor.model={model}", f"--run.directory={tmp_path}"])
    with claim(config, resume=False) as directory, progress_display(name, 2) as progress:
        assert Supervisor(config, directory, os.cpu_count() or 1, progress, popen=popen).run()
    steps = [row for row in read_jsonl(directory.metrics) if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["tokens/sampled"] > 0 for row in steps)
    summary = json.loads((write_report(directory.path, progress.status) / "summary.json").read_text())
    assert law_holds(summary["accounting"])


def test_recipes_of_data_algorithms_are_short() -> None:
    files = [Path(__file__).parents[2] / "recipes" / f"{name}.toml" for name in RECIPES]
    assert len(files) >= 7
    assert {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > 40} == {}
