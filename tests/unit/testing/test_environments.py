"""The suite of environments: right ones pass, and each fault is found."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.config.rooms import ROOMS
from astraflow.contracts import Environment
from astraflow.sources.calculator import CalculatorSource
from astraflow.testing.environments.suite import check_environment
from astraflow.types import Action, Step, Task
from recorded import lines, recorded

TASKS = [{"start": 0}, {"start": 1}]


def count(task: Task, told: list[Step], chance: Any) -> str:
    return str(int(told[-1].text[:-1]) + 1)


@pytest.mark.parametrize("name", ["Counter", "HeavyCounter"])
def test_a_good_environment_passes_wherever_it_runs(name: str) -> None:
    report = check_environment(f"world_samples:{name}", TASKS, oracle=count, actions=["1", "2", "3"])
    assert (report.oracle, report.null) == (1.0, 0.0) and 0.0 <= report.random < 1.0


def test_reports_are_equal_from_call_to_call() -> None:
    once, twice = (check_environment("world_samples:Counter", TASKS, actions=["1", "2"]) for _ in range(2))
    assert once == twice and once.oracle is None


def test_tools_of_the_calculator_are_called_at_random() -> None:
    source = CalculatorSource(split="heldout")
    tasks = [source.row(row) for row in range(len(source))]

    def oracle(task: Task, told: list[Step], chance: Any) -> Action | str:
        return (
            Action(tool="calc", arguments={"expr": task["text"][:3]}) if len(told) == 1 else told[-1].text[1:-1] + "."
        )

    report = check_environment("calculator", tasks, oracle=oracle)
    recorded("`calculator`", "60 held out", oracle=report.oracle, null=report.null, random=report.random)


def test_every_environment_that_ships_is_recorded() -> None:
    shown = {line.split("`")[1] for line in lines()}
    assert set(ROOMS["environments"]) <= shown


class Falls(Environment):
    """Each option is a fault."""

    def __init__(self, *, fault: str) -> None:
        self.fault = fault

    def reset(self, task: Task) -> str:
        return "" if self.fault == "silent" else "?"

    def step(self, action: Action) -> Step:
        if self.fault == "key" and action.tool is not None:
            return Step({"calc": "1"}[action.tool])
        if self.fault == "text":
            return Step(7)  # type: ignore[arg-type]
        return Step("", float("nan") if self.fault == "nan" else 0.5, done=True)


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("world_samples:Hashes", {}, ["another process (PYTHONHASHSEED=1)"]),
        ("world_samples:Chance", {}, ["take turns"]),
        ("world_samples:Counter", {"oracle": lambda *_: "9"}, ["the oracle earns 0.0 of 1.0"]),
        ("world_samples:Counter", {"oracle": count, "best": lambda task: 1 - task["start"]}, ["earns 1.0 of 0"]),
        ({"type": f"{__name__}:Falls", "fault": ""}, {}, ["who says nothing earns 0.5; say what that is worth"]),
        ({"type": f"{__name__}:Falls", "fault": "silent"}, {"null": None}, ["nothing is told at the start"]),
        ({"type": f"{__name__}:Falls", "fault": "key"}, {"null": None}, ["'no_such_tool' is a failure", "KeyError"]),
        ({"type": f"{__name__}:Falls", "fault": "nan"}, {"null": None}, ["a reward is not finite"]),
        ({"type": f"{__name__}:Falls", "fault": "text"}, {"null": None}, ["a step is no JSON"]),
    ],
)
def test_each_fault_is_named(spec: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_environment(spec, TASKS, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
