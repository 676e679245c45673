"""Every reward that asks no service, with answers that it tells apart."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from astraflow.types import Outcome, Task
from astraflow.workflows.load import reward_function

ADD = {"entries": ["f"], "tests": ["assert f(1, 2) == 3", "assert f(0, 5) == 5"]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {  # options, fields of the task, answers
    "exact": ({}, {"answer": "7"}, ["7", "8"]),
    "exact_match": ({}, {"answers": ["Paris"]}, ["the paris", "Rome"]),
    "f1": ({}, {"answers": ["Paris France"]}, ["Paris", "Rome"]),
    "sums": ({}, {"answer": "7"}, ["7", "It is 7.", "8"]),
    "gsm8k": ({}, {"answer": "7"}, ["The answer is 7.", "8"]),
    "calculation": ({}, {"answer": "7", "equation": "3 + 4"}, ["3 + 4", "4 - 3"]),
    "code": ({"credit": "share"}, ADD, ["def f(a, b):\n    return a + b", "def f(a, b):\n    return 5"]),
    "function": (
        {"style": "trl", "form": "text", "function": "foreign_rewards:trl_plain"},
        {"answer": "7"},
        ["12345", ""],
    ),
    "math": ({"deadline_s": 60.0, "processes": 1}, {"answer": "x+1"}, [r"\boxed{1+x}", r"\boxed{x}"]),
    "reasoning_gym": ({"deadline_s": 60.0, "processes": 1}, {"generator": "chain_sum", "number": 0}, ["7 ", ""]),
}


async def graded(name: str) -> list[Any]:
    """Its verdicts on the answers of `CASES`, as plain values."""
    options, fields, answers = CASES[name]
    reward, task = reward_function({"type": name, **options}), Task("train", 0, 0, {"question": "3+4?", **fields})
    said = [reward(answer, task) for answer in answers]
    outcomes = [await one if inspect.isawaitable(one) else one for one in said]
    return [msgspec.to_builtins(one) if isinstance(one, Outcome) else one for one in outcomes]
