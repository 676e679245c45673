"""Where tasks come from: a row is a dict, and the same index always gives the same row."""

from __future__ import annotations

import json
import random
from typing import Any

FRUITS = ("fig", "kiwi", "lime", "plum", "pear")


class Prices:
    """What does a fruit cost today? `fig?` is answered by its price, which is another one in each task."""

    def __init__(self, *, split: str = "train", size: int = 800) -> None:
        """Parameters are settings of the source in run.toml."""
        self.split, self.size = split, size

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> dict[str, Any]:
        chance = random.Random(f"{self.split}/{index}")
        prices = dict(zip(FRUITS, chance.sample(range(10), len(FRUITS)), strict=True))
        return {"question": f"{chance.choice(FRUITS)}?", "prices": prices}

    def fingerprint(self) -> str:
        """Changes when the rows do: a run goes on only with the tasks that it began with."""
        return f"prices-{self.split}-{self.size}"


class Demos(Prices):
    """Conversations that show a model without any training how to ask and to answer, but for any fruit.

    Not needed with a model that can follow an instruction and call a tool.
    """

    def row(self, index: int) -> dict[str, Any]:
        row = super().row(index)
        asked = random.Random(index).choice(FRUITS)
        function = {"name": "price", "arguments": json.dumps({"item": asked})}
        calls = [{"id": "0", "type": "function", "function": function}]
        price = str(row["prices"][asked])
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "0", "content": f"<{price}>"},
            {"role": "assistant", "content": price},
        ]
        return {"messages": messages}
