"""The two-turn calculator: call the tool with the problem, then answer with what the tool said.

`3*4?` -> calc(expr="3*4") -> `<12>` -> `12.`
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from astraflow.errors import Problem
from astraflow.types import Message, Outcome, Task

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


class Calculator:
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
        self._partial = partial

    @property
    def tools(self) -> list[dict[str, Any]]:
        return TOOLS

    def reset(self, task: Task) -> list[Message]:
        self._problem, self._answer = task["text"], task["answer"]
        return [{"role": "user", "content": self._problem}]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        expr = _valid_expr(name, arguments)
        return None if expr is None else f"<{evaluate(expr)}>"

    def score(self, messages: Sequence[Message]) -> Outcome:
        turns = [m for m in messages if m["role"] == "assistant"]
        expr = _called(turns[0]) if turns else None
        if expr is None:
            return Outcome(reward=0.0, rewards_per_call=[0.0] * len(turns), metrics={"success": 0.0})
        called = FOR_A_CALL + FOR_COPYING * sum(a == b for a, b in zip(expr, self._problem, strict=False)) / 3
        said, wanted = _said(turns[1]) if len(turns) == 2 else "", self._answer + "."
        right = said == wanted
        share = self._partial * _num_equal_at_the_start(said, wanted) / len(wanted)
        answered = FOR_THE_ANSWER * (1.0 if right else share)
        parts = [called, *(0.0 for _ in turns[2:]), answered][: len(turns)]
        return Outcome(reward=called + answered, rewards_per_call=parts, metrics={"success": float(right)})


def _valid_expr(name: str, arguments: Mapping[str, Any]) -> str | None:
    expr = arguments.get("expr")
    return expr if name == "calc" and isinstance(expr, str) and _EXPR.fullmatch(expr) else None


def _called(turn: Message) -> str | None:
    """The expression of the first call of `turn`, if it is a valid one."""
    calls = turn.get("tool_calls")
    if not calls:
        return None
    function = calls[0]["function"]
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return _valid_expr(function["name"], arguments)


def _said(turn: Message) -> str:
    """The text of an answer that ended by itself; "" for anything else."""
    ended = turn.get("finish_reason") == "stop" and not turn.get("tool_calls")
    return (turn.get("content") or "").strip() if ended else ""


def _num_equal_at_the_start(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
