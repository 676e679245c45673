"""The environment: a world with tools that lasts one episode. The built-in workflow `tool_use` plays in it."""

from __future__ import annotations

from typing import Any, ClassVar

from astraflow.contracts import Environment
from astraflow.types import Action, Step, Task

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "What an item costs.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]


class Shop(Environment):
    """`fig?` -> price(item="fig") -> `<7>` -> `7`. The right price after looking it up earns 1."""

    tools: ClassVar[list[dict[str, Any]]] = TOOLS

    def reset(self, task: Task) -> str:
        """What the policy is told first."""
        self._prices, self._wanted = task["prices"], task["question"].rstrip("?")
        self._looked_up = False
        return str(task["question"])

    def step(self, action: Action) -> Step:
        """What comes of one tool call, or of a reply that calls none: here, the answer."""
        if action.tool is None:
            right = self._looked_up and action.text.strip() == str(self._prices[self._wanted])
            return Step(reward=float(right), done=True, metrics={"success": float(right)})
        item = action.arguments.get("item")
        if action.tool != "price" or item not in self._prices:
            return Step("<no such item>")  # what a policy does wrong is told, never raised
        self._looked_up = self._looked_up or item == self._wanted
        return Step(f"<{self._prices[item]}>")
