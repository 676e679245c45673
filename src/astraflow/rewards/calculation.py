"""Grader of a calculation that is written down and left to the grader to work out: `76 - 25`.

For models that can tell which numbers of a word problem belong together, and how, but cannot count.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from astraflow.types import Outcome, Task

_TOKEN = re.compile(r"\s*(?:(\d{1,12}(?:\.\d{1,6})?)|([-+*/()]))")
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "x": "*"})
_INSIDE = re.compile(r"\d+(?:\.\d+)?(?:\s*[-+*/x\u00d7\u00f7\u2212]\s*\d+(?:\.\d+)?)+")
MAX_CHARS = 200  # longer calculations are not read


class Calculation:
    """1.0 when the reply is a calculation, and nothing else, whose value is the answer.

    A calculation of another value gets 0.1 + 0.2 x F1 of its numbers against those of the task's own `equation`. One
    that stands in other words gets half of what it would get alone, but no more than 0.15. No calculation: 0. Numbers,
    `+ - * /` and parentheses are read; None when the task has no answer to compare with.
    """

    def __init__(self, *, field: str = "answer", equation: str = "equation") -> None:
        self._field, self._equation = field, equation

    def __call__(self, completion: str, task: Task) -> Outcome | None:
        wanted = _value(str(task.get(self._field, "")))
        if wanted is None:
            return None
        score, right = self._grade(completion.strip(), wanted, task)
        if score == 0.0:
            within = _INSIDE.search(completion)
            score = min(0.15, 0.5 * self._grade(within.group(), wanted, task)[0]) if within else 0.0
        return Outcome(reward=score, metrics={"success": float(right)})

    def _grade(self, text: str, wanted: Fraction, task: Task) -> tuple[float, bool]:
        value = _value(text)
        numbers = _numbers(text)
        if value is None or numbers.total() < 2:
            return 0.0, False
        if value == wanted:
            return 1.0, True
        own = _numbers(str(task.get(self._equation, "")))
        f1 = 2 * (numbers & own).total() / (numbers.total() + own.total())
        return 0.1 + 0.2 * f1, False


def _numbers(text: str) -> Counter[Fraction]:
    return Counter(Fraction(found) for found in re.findall(r"\d{1,12}(?:\.\d{1,6})?", text[:MAX_CHARS]))


def _value(text: str) -> Fraction | None:
    """Of a whole calculation; None when it is none, or divides by 0."""
    tokens = _tokens(text)
    if tokens is None:
        return None
    try:
        value, rest = _sum(tokens, 0)
    except (ValueError, ZeroDivisionError):
        return None
    return value if rest == len(tokens) else None


def _tokens(text: str) -> list[str] | None:
    text = text.strip().translate(_SIGNS)
    if not text or len(text) > MAX_CHARS or not text.isascii():
        return None
    found: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        found.append(match.group(1) or match.group(2))
        at = match.end()
    return found


def _sum(tokens: list[str], at: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] in "+-":
        right, after = _product(tokens, at + 1)
        value, at = (value + right if tokens[at] == "+" else value - right), after
    return value, at


def _product(tokens: list[str], at: int) -> tuple[Fraction, int]:
    value, at = _atom(tokens, at)
    while at < len(tokens) and tokens[at] in "*/":
        right, after = _atom(tokens, at + 1)
        value, at = (value * right if tokens[at] == "*" else value / right), after
    return value, at


def _atom(tokens: list[str], at: int) -> tuple[Fraction, int]:
    if at == len(tokens):
        raise ValueError("the calculation ends too early")
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1)
        if at == len(tokens) or tokens[at] != ")":
            raise ValueError("a parenthesis is not closed")
        return value, at + 1
    return Fraction(tokens[at]), at + 1  # ValueError for a sign
