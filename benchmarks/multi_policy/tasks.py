"""A code to be found out: each pair of letters stands for a digit, by chance, so that what is learnt of one says
nothing about another; a batch has a part of them. And what is shown before: how an answer and a verdict look, many of
them wrong."""

from __future__ import annotations

import random
import string
from typing import Any

LETTERS = string.ascii_lowercase


class Letters:
    """`kb?`, answer `3`; the same code in every run. Args: pairs: how many, at most 676; digits: that answers have."""

    def __init__(self, *, pairs: int, digits: int) -> None:
        rng = random.Random(7)
        every = [first + second for first in LETTERS for second in LETTERS]
        rng.shuffle(every)
        self.digits = "0123456789"[:digits]
        self.code = [(pair, rng.choice(self.digits)) for pair in every[:pairs]]

    def __len__(self) -> int:
        return len(self.code)

    def row(self, index: int) -> dict[str, Any]:
        """The same index always gives the same fields."""
        pair, digit = self.code[index % len(self.code)]
        return {"question": f"{pair}?", "answer": digit}

    def fingerprint(self) -> str:
        """Of the rows."""
        return f"{type(self).__name__}-{vars(self)}"


class Shown(Letters):
    """A conversation about each pair. What is said is right with probability `right`, else drawn by chance; `of`:
    "answer", or "verdict" on `kb?2=`, which is y or n."""

    def __init__(self, *, of: str, right: float, pairs: int, digits: int, size: int = 6400) -> None:
        super().__init__(pairs=pairs, digits=digits)
        self.of, self.right, self.size = of, right, size

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> dict[str, Any]:
        """The same index always gives the same conversation."""
        task, rng = super().row(index), random.Random(f"{self.of}/{index}")
        asked, said, chance = task["question"], task["answer"], self.digits
        if self.of == "verdict":
            said, chance = rng.choice("yn"), "yn"
            asked += (task["answer"] if said == "y" else rng.choice(self.digits)) + "="
        if rng.random() >= self.right:
            said = rng.choice(chance)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
