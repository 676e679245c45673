"""The two-turn calculator: call the tool with the problem, then answer with what the tool said.

`3*4?` -> calc(expr="3*4") -> `<12>` -> `12.`
"""

from __future__ import annotations

import re
from typing import Any

from astraflow.contracts import Environment
from astraflow.errors import Problem
from astraflow.types import Action, Step, Task

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Evaluate one sum.",
            "parameters": {
                "type": "object",
                "properties": {"expr": {"type": "string", "description": "Two digits with an operator between them."}},
                "required": ["expr"],
            },
        },
    }
]
_EXPR = re.compile(r"[0-9][-+*][0-9]", re.ASCII)

FOR_A_CALL, FOR_COPYING, FOR_THE_ANSWER = 0.1, 0.2, 0.7


def evaluate(expr: str) -> int:
    """`expr` is one digit, one of + - *, one digit."""
    a, op, b = int(expr[0]), expr[1], int(expr[2])
    return a + b if op == "+" else a - b if op == "-" else a * b


class Calculator(Environment):
    """Reward: 0.1 for a valid call, 0.2 x share of the problem copied into it, 0.7 for the right answer after it.

    Only `digit operator digit` is a call; anything else ends the conversation as plain content would. The answer counts
    when it is the second turn, ended by itself (not by length), and reads `<number>.`. Rewards per call are these parts
    of the reward: what the call earned, and what the answer did (for `per_call` with `outcome = 0`).

    `partial`: share of the 0.7 that a wrong answer can earn, by its leading characters that are right. Without it a
    group whose answers are all wrong has nothing to tell them apart, and two-digit answers may never be found.
    """

    def __init__(self, *, partial: float = 0.0) -> None:
        if not 0 <= partial < 1:
            raise Problem("calculator.partial", partial, "must be in [0, 1)", "use 0 for right answers only")
        self._problem = self._answer = ""
        self._called = False
        self._partial = partial

    @property
    def tools(self) -> list[dict[str, Any]]:
        return TOOLS

    def reset(self, task: Task) -> str:
        self._problem, self._answer = task["text"], task["answer"]
        return self._problem

    def step(self, action: Action) -> Step:
        if action.tool is None:
            return self._answered(action)
        expr = _valid_expr(action)
        if expr is None:
            return Step(done=True, metrics={"success": 0.0})
        first, self._called = not self._called, True
        return Step(f"<{evaluate(expr)}>", self._copied(expr) if first else 0.0, metrics={"success": 0.0})

    def _copied(self, expr: str) -> float:
        return FOR_A_CALL + FOR_COPYING * sum(a == b for a, b in zip(expr, self._problem, strict=False)) / 3

    def _answered(self, action: Action) -> Step:
        said, wanted = action.text.strip(), self._answer + "."
        if not self._called or action.turn != 2 or action.finish_reason != "stop":
            return Step(done=True, metrics={"success": 0.0})
        share = 1.0 if said == wanted else self._partial * _num_equal_at_the_start(said, wanted) / len(wanted)
        return Step("", FOR_THE_ANSWER * share, done=True, metrics={"success": float(said == wanted)})


def _valid_expr(action: Action) -> str | None:
    expr = action.arguments.get("expr")
    return expr if action.tool == "calc" and isinstance(expr, str) and _EXPR.fullmatch(expr) else None


def _num_equal_at_the_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
