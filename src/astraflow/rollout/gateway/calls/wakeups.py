"""Carries what engines say in their threads to the event loop, one wake-up for all that came in the meantime."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


class Wakeups:
    """What is posted is done in the order in which it was posted."""

    __slots__ = ("_posted", "_scheduled")

    def __init__(self) -> None:
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._scheduled = False

    def post(self, loop: asyncio.AbstractEventLoop, act: Callable[..., None], *arguments: Any) -> None:
        """Have `act` called on the loop. From any thread."""
        self._posted.append((act, arguments))
        if not self._scheduled and not loop.is_closed():
            self._scheduled = True
            loop.call_soon_threadsafe(self._do_all)

    def _do_all(self) -> None:
        self._scheduled = False  # before reading, so what is added while reading is read now or wakes us again
        while self._posted:
            act, arguments = self._posted.popleft()
            act(*arguments)
