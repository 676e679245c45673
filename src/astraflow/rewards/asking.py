"""Verdicts that processes give, each asked for once."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from astraflow.processes.pool import ProcessPool
from astraflow.processes.records import CallFailed

NUM_KEPT = 50_000


class Asking:
    """The newest verdicts of a pool by their arguments, those included that are still to come: equal answers of
    siblings cost one call. One that missed its deadline or raised is kept too; what was lost is asked for again."""

    def __init__(self, pool: ProcessPool, method: str) -> None:
        self.pool, self._method = pool, method
        self._keeping = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Future[Any]] = OrderedDict()

    async def verdict(self, *arguments: Any) -> Any:
        """Raises: CallFailed."""
        return await asyncio.shield(asyncio.wrap_future(self._asked(arguments)))  # siblings may wait for it too

    def _asked(self, arguments: tuple[Any, ...]) -> Future[Any]:
        with self._keeping:
            known = self._kept.get(arguments)
            if known is not None and not _passing(known):
                self._kept.move_to_end(arguments)
                return known
            asked = self.pool.submit(self._method, *arguments)
            self._kept[arguments] = asked
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return asked


def _passing(future: Future[Any]) -> bool:
    """It failed for a reason that need not hold the next time."""
    if not future.done():
        return False
    error = None if future.cancelled() else future.exception()
    return future.cancelled() or (isinstance(error, CallFailed) and error.kind in ("lost", "start", "closed"))
