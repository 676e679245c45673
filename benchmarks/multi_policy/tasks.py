"""A code to be found out: each letter stands for a digit. 26 tasks that a tiny model learns from rewards alone in some
twenty steps. And what it is shown before: how an answer and a verdict look, hardly any of them right."""

from __future__ import annotations

import random
import string
from typing import Any

LETTERS, DIGITS = string.ascii_lowercase[:12], "0123"


class Letters:
    """`k?`, answer `3`."""

    def __len__(self) -> int:
        return len(LETTERS)

    def row(self, index: int) -> dict[str, Any]:
        """The same index always gives the same fields."""
        place = index % len(LETTERS)
        return {"question": f"{LETTERS[place]}?", "answer": DIGITS[place * 3 % 4]}

    def fingerprint(self) -> str:
        """Of the rows."""
        return f"{type(self).__name__}-{vars(self)}"


class Shown(Letters):
    """A conversation about each letter. What is said is right with probability `right`, else drawn by chance; `of`:
    "answer", or "verdict" on `k?5=`, which is y or n."""

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
