"""What engines sample and workers play in fault drills: digits, some of them right; some tasks fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError
from astraflow.types import Task

_EOS, _ZERO = 2, 3  # ids of tiny-char
_FAILS_EVERY = 41


def digit(prompt: np.ndarray, number: int) -> list[int]:
    """One digit, from 0 to 9 in an order that looks like chance."""
    return [_ZERO + (number * 3) % 10, _EOS]


async def play(task: Task, llm: Mapping[str, LLM]) -> float:
    """Half of the answers are right; every 41st task fails, and its group is dropped with that reason."""
    reply: Any = await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
    if task.row % _FAILS_EVERY == _FAILS_EVERY - 1:
        raise EpisodeError("drill: this task fails")
    return float(reply.content[:1] in set("56789"))
