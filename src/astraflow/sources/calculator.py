"""Single-digit problems for the calculator tool, and demonstrations of how to call it."""

from __future__ import annotations

import random
from typing import Any

from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, check_size, check_split, digest, members, problem_at

OPERATORS = "+-*"
NUM_PROBLEMS = 10 * 10 * len(OPERATORS)
NUM_HELDOUT = 60

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
]  # the same schema as environments.calculator.TOOLS; a test holds the two equal


def _parts(problem: int) -> tuple[int, str, int]:
    rest, op = divmod(problem, len(OPERATORS))
    a, b = divmod(rest, 10)
    return a, OPERATORS[op], b


def _value(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


class CalculatorSource:
    """Rows `{text, answer, a, b, op}`: all distinct problems of the split in a seeded order, again and again.

    60 of the 300 problems are held out for good: no train row and no demonstration contains one.
    """

    def __init__(
        self, *, split: str = "train", ops: str = OPERATORS, size: int = 0, seed: int = 0, demos: bool = False,
        right: float = 0.2,
    ) -> None:  # fmt: skip
        """`ops`: only problems with one of these operators, "+" for sums. `size`: rows; 0: each distinct problem once.
        `demos`: rows `{messages, tools}` from train problems only; a share `right` of them calls for its own problem,
        the others for another one, so their answer is wrong.
        """
        check_size("sources.calculator", size)
        if not 0.0 <= right <= 1.0:
            raise SourceError("sources.calculator.right", right, "must be a share from 0 to 1", "give 0.2, say")
        if not ops or len(set(ops)) != len(ops) or not set(ops) <= set(OPERATORS):
            raise SourceError(
                "sources.calculator.ops", ops, f"must be some of {OPERATORS}, each once", "use '+' for sums only"
            )
        self._split = check_split("sources.calculator", split)
        every = members("calculator", NUM_PROBLEMS, NUM_HELDOUT, "train" if demos else self._split)
        self._problems = tuple(problem for problem in every if _parts(problem)[1] in ops)
        self._ops = "".join(op for op in OPERATORS if op in ops)
        self._size = size or len(self._problems)
        self._seed, self._demos, self._right = seed, demos, right

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.calculator", index, self._size)
        a, op, b = _parts(problem_at(index, self._seed, self._problems))
        if self._demos:
            return self._demo(index, a, op, b)
        return {"text": f"{a}{op}{b}?", "answer": str(_value(a, op, b)), "a": a, "b": b, "op": op}

    def fingerprint(self) -> str:
        return digest("calculator", 4, self._split, self._ops, self._size, self._seed, self._demos, self._right)

    def _demo(self, index: int, a: int, op: str, b: int) -> dict[str, Any]:
        """How to call and to answer, not what to call: that is right with probability `right`, or by luck."""
        rng = random.Random(f"{self._seed}/demo/{index}")
        right = rng.random() < self._right
        called = (a, op, b) if right else _parts(rng.choice(self._problems))
        value = _value(*called)
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": "calc", "arguments": f'{{"expr": "{called[0]}{called[1]}{called[2]}"}}'},
        }
        messages = [
            {"role": "user", "content": f"{a}{op}{b}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": f"<{value}>"},
            {"role": "assistant", "content": f"{value}."},
        ]
        return {"messages": messages, "tools": TOOLS}
