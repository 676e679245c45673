"""Every recipe of a data algorithm trains two steps as real processes, with its own operators, credit and stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.env import child_environment
from astraflow.config.recipes import recipe_names
from astraflow.observe.summary import law_holds
from astraflow.testing.forked import popen
from astraflow.testing.runs import astraflow_command

pytestmark = [pytest.mark.flow, pytest.mark.slow]
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
    assert done.wait(300) == 0, path.with_suffix(".log").read_text()
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_a_data_algorithm_trains(name: str, model: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run(tmp_path, name, *SMALL, f"--policies.actor.model={model}")
    assert ended.code == 0, ended.words()
    assert [row["step"] for row in ended.steps()] == [1, 2]
    assert all(row["tokens/sampled"] > 0 for row in ended.steps())
    assert law_holds(ended.summary()["accounting"])


def test_recipes_of_data_algorithms_are_short() -> None:
    files = [Path(__file__).parents[2] / "recipes" / f"{name}.toml" for name in RECIPES]
    assert len(files) >= 7
    assert {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > 40} == {}
