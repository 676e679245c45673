"""Whether the environment and the agent do what they should, without a model: python -m pytest"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from astraflow.testing.environments.suite import check_environment
from astraflow.testing.episodes import RunFile, calls
from astraflow.types import Action, Step, Task

RUN = RunFile(Path(__file__).with_name("run.toml"))  # checks the whole file, as `astraflow validate` does


def knows(task: Task, told: Sequence[Step], chance: Random) -> Action | str:
    """A policy that does everything right."""
    if len(told) == 1:
        return Action(tool="price", arguments={"item": task["question"].rstrip("?")})
    return told[-1].text.strip("<>")


def test_the_environment_keeps_its_contract() -> None:
    """Who does all right earns 1, who says nothing earns 0, and the same actions always tell the same."""
    report = check_environment("shop:Shop", [RUN.task("train", row).fields for row in range(20)], oracle=knows)
    assert report.random < 0.2


def test_an_episode_as_the_run_file_plays_it() -> None:
    task = RUN.task("train", 0)
    fruit = task["question"].rstrip("?")
    price = str(task["prices"][fruit])
    assert RUN.play(task, actor=[calls("price", item=fruit), price]).reward == 1.0
    assert RUN.play(task, actor=[price]).reward == 0.0  # without looking it up


def test_what_is_wrong_is_told() -> None:
    task = RUN.task("train", 0)
    played = RUN.play(task, actor=[calls("price", item="brick"), "0"])
    assert played.reward == 0.0
    assert played.heard["actor"][1][-1]["content"] == "<no such item>"
