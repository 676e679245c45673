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
    """Conversations that show models without any training what to say, right or wrong: any digit, or y or n.

    Not needed with models that can follow an instruction.
    """

    def __init__(self, *, of: str = "answer") -> None:
        """`of`: "answer" or "verdict"."""
        super().__init__()
        self.of = of

    def row(self, index: int) -> dict[str, Any]:
        chance = random.Random(index)
        asked = super().row(index)["question"]
        said = chance.choice(asked[:3])
        if self.of == "verdict":
            asked, said = f"{asked}{said}=", chance.choice("yn")
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}

    def fingerprint(self) -> str:
        return f"demos-{self.of}"
