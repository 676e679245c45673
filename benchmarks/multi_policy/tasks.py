"""A code to be found out: each of 96 pairs of letters stands for a digit, by chance, so that what is learnt of one says
nothing about another; a batch has a third of them. And what is shown before: how an answer and a verdict look, many of
them wrong."""

from __future__ import annotations

import random
import string
from typing import Any

LETTERS, DIGITS, PAIRS = string.ascii_lowercase[:12], "0123", 96


def _code() -> list[tuple[str, str]]:
    """(pair, digit), the same in every run."""
    rng = random.Random(7)
    pairs = [first + second for first in LETTERS for second in LETTERS]
    rng.shuffle(pairs)
    return [(pair, rng.choice(DIGITS)) for pair in pairs[:PAIRS]]


CODE = _code()


class Letters:
    """`kb?`, answer `3`."""

    def __len__(self) -> int:
        return len(CODE)

    def row(self, index: int) -> dict[str, Any]:
        """The same index always gives the same fields."""
        pair, digit = CODE[index % len(CODE)]
        return {"question": f"{pair}?", "answer": digit}

    def fingerprint(self) -> str:
        """Of the rows."""
        return f"{type(self).__name__}-{vars(self)}"


class Shown(Letters):
    """A conversation about each pair. What is said is right with probability `right`, else drawn by chance; `of`:
    "answer", or "verdict" on `kb?2=`, which is y or n."""

    def __init__(self, *, of: str, right: float, size: int = 6400) -> None:
        self.of, self.right, self.size = of, right, size

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> dict[str, Any]:
        """The same index always gives the same conversation."""
        task, rng = super().row(index), random.Random(f"{self.of}/{index}")
        asked, said, chance = task["question"], task["answer"], DIGITS
        if self.of == "verdict":
            said, chance = rng.choice("yn"), "yn"
            asked += (task["answer"] if said == "y" else rng.choice(DIGITS)) + "="
        if rng.random() >= self.right:
            said = rng.choice(chance)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
