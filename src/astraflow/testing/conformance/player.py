"""The task of a conformance run, and how our own node plays it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.types import Task


class Questions:
    """Rows `{question, answer, pause_s}`: whoever waits `pause_s` before a commit can be seen to be cancelled."""

    def __init__(self, *, pause_s: float = 0.0, size: int = 1000) -> None:
        self._pause_s, self._size = pause_s, size

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        """Always the same sum."""
        return {"question": "What is 1+1?", "answer": "2", "pause_s": self._pause_s}

    def fingerprint(self) -> str:
        """Changes with the options."""
        return f"questions/{self._pause_s}/{self._size}"


async def play(task: Task, llm: Mapping[str, LLM]) -> float:
    """Ask once."""
    await asyncio.sleep(task["pause_s"])
    reply: Any = await llm["actor"].chat([{"role": "user", "content": task["question"]}])
    return float(reply.content[:1] in set("56789"))
