"""Graders of numeric answers, shaped so that a small model finds a slope to climb from its first replies.

Both say `success` (the number is right) beside the reward.
"""

from __future__ import annotations

import re
from decimal import Decimal

from astraflow.types import Outcome, Task

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?!\d)", re.ASCII)
_FORMATS = (
    re.compile(r"####\s*\$?([^\n]{1,60})"),
    re.compile(r"\\boxed\{([^{}\n]{1,60})\}"),
    re.compile(r"answer\s*(?:is|:)\s*\$?([^\n]{1,60})", re.IGNORECASE),
)
_PLAIN = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "*": " ", "$": " ", "=": " ", "+": " "})
MAX_DIGITS = 30  # longer digit strings are not taken for numbers


def parse_number(text: str) -> Decimal | None:
    """The last number in `text`, or None. Reads `1,000`, `$5`, `-3.50`, `\u22127` and full-width digits."""
    found = None
    for match in _NUMBER.finditer(_ascii_digits(text).translate(_PLAIN)):
        digits = match.group().replace(",", "")
        if len(digits) <= MAX_DIGITS:
            found = digits
    return None if found is None else Decimal(found)


def _ascii_digits(text: str) -> str:
    if text.isascii():
        return text
    return "".join(str(ord(c) - 0xFF10) if "\uff10" <= c <= "\uff19" else c for c in text)


def _answer_of(task: Task, field: str) -> Decimal | None:
    value = task.get(field)
    return None if value is None else parse_number(str(value))


class ShapedNumber:
    """For short sums: 1.0 when the reply is the right number and nothing else.

    A reply whose last number is right gets 0.5 plus 0.5 x brevity, where brevity = characters of the answer over
    characters of the reply: the sentence `7+5 is 12.` earns less than `12`. A wrong number gets 0.05, plus 0.15 x share
    of its digits that are right x brevity. No number: 0. None when the task has no number to compare with.
    """

    def __init__(self, *, field: str = "answer") -> None:
        self._field = field

    def __call__(self, completion: str, task: Task) -> Outcome | None:
        answer = _answer_of(task, self._field)
        if answer is None:
            return None
        reply = completion.strip()
        guess = parse_number(reply)
        if guess is None:
            return _outcome(0.0, right=False)
        wanted = str(answer)
        brevity = min(1.0, len(wanted) / max(1, len(reply)))
        if guess == answer:
            return _outcome(0.5 + 0.5 * brevity, right=True)
        return _outcome(0.05 + 0.15 * brevity * _digit_overlap(str(guess), wanted), right=False)


def _outcome(reward: float, *, right: bool) -> Outcome:
    return Outcome(reward=reward, metrics={"success": float(right)})


def _digit_overlap(got: str, wanted: str) -> float:
    """Share of equal characters, aligned at the last digit."""
    equal = sum(a == b for a, b in zip(reversed(got), reversed(wanted), strict=False))
    return equal / max(len(got), len(wanted))


class ShapedGsm8k:
    """For word problems: 1.0 when the final number is right, whatever its form.

    The final number is the one behind `####`, `\\boxed{}` or `answer is` (the last such place), else the last number of
    the reply. When it is wrong: 0.1 x (1 + closeness) if it stood in one of those places, else 0.02 + 0.05 x closeness,
    where closeness = 1 - |got - wanted| / max(|wanted|, 1), at least 0. No number: 0. None when the task has no number
    to compare with.
    """

    def __init__(self, *, field: str = "answer") -> None:
        self._field = field

    def __call__(self, completion: str, task: Task) -> Outcome | None:
        answer = _answer_of(task, self._field)
        if answer is None:
            return None
        guess, in_format = final_number(completion)
        if guess is None:
            return _outcome(0.0, right=False)
        if guess == answer:
            return _outcome(1.0, right=True)
        closeness = max(0.0, 1.0 - float(abs(guess - answer) / max(abs(answer), Decimal(1))))
        return _outcome(0.1 + 0.1 * closeness if in_format else 0.02 + 0.05 * closeness, right=False)


def final_number(completion: str) -> tuple[Decimal | None, bool]:
    """The number a reply ends at, and whether it stood in a place made for answers."""
    best: re.Match[str] | None = None
    for pattern in _FORMATS:
        for match in pattern.finditer(completion):
            if best is None or match.start() > best.start():
                best = match
    if best is not None:
        first = _NUMBER.search(_ascii_digits(best.group(1)).translate(_PLAIN))
        number = parse_number(first.group()) if first else None
        if number is not None:
            return number, True
    return parse_number(completion), False
