"""Where tasks come from: a row is a dict, and the same index always gives the same row."""

from __future__ import annotations

import random
from typing import Any

ORDER = random.Random(0).sample(range(1000), 1000)
HELD_OUT = 100


class Largest:
    """Which of three digits is the largest? `492?` is answered by `9`. The last 100 of 1,000 rows are held out."""

    def __init__(self, *, split: str = "train") -> None:
        """Parameters are settings of the source in run.toml."""
        self.split = split
        self.numbers = ORDER[-HELD_OUT:] if split == "heldout" else ORDER[:-HELD_OUT]

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, index: int) -> dict[str, Any]:
        digits = f"{self.numbers[index]:03d}"
        return {"question": f"{digits}?", "answer": max(digits)}

    def fingerprint(self) -> str:
        """Changes when the rows do: a run goes on only with the tasks that it began with."""
        return f"largest-{self.split}"


class Demos(Largest):
    """Conversations that show a model without any training what an answer looks like, right or wrong: any digit.

    Not needed with a model that can follow an instruction.
    """

    def row(self, index: int) -> dict[str, Any]:
        question = super().row(index)["question"]
        said = random.Random(index).choice(question[:3])
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": said}]}
