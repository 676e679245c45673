"""Finished episodes go to the dataflow service: whatever finished since the last send leaves in one request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from astraflow.errors import Unreachable
from astraflow.rollout.loop import in_thread
from astraflow.types import Episode

log = logging.getLogger("astraflow.node")
MAX_EPISODES = 256  # of one request
_PAUSE_S = 0.5


class Reach:
    """How long the dataflow service has been out of reach, over all loops of a node."""

    def __init__(self, give_up_s: float) -> None:
        self.give_up_s = give_up_s
        self._last = time.monotonic()
        self.num_failures = 0

    def ok(self) -> None:
        """It answered."""
        self._last = time.monotonic()

    def failed(self, error: Unreachable) -> None:
        """It did not. Raises: Unreachable: it has not answered for `give_up_s`."""
        self.num_failures += 1
        silent_s = time.monotonic() - self._last
        if silent_s > self.give_up_s:
            raise Unreachable(f"{error}; given up after {silent_s:.0f} s without any answer") from error
        log.warning("no answer for %.0f s: %s", silent_s, error)


class Committer:
    """Keeps finished episodes until the dataflow service has them. `results`: "accepted", "duplicate", "refused"."""

    def __init__(self, commit: Callable[[Sequence[Episode]], dict[str, str]], reach: Reach) -> None:
        """`commit` blocks; it is called on a thread of its own."""
        self._commit, self.reach = commit, reach
        self._pending: list[Episode] = []
        self._num_sending = 0
        self._changed = asyncio.Event()
        self.results: Counter[str] = Counter()

    @property
    def backlog(self) -> int:
        """Episodes not yet acknowledged."""
        return len(self._pending) + self._num_sending

    def add(self, episode: Episode) -> None:
        """Send it as soon as possible."""
        self._pending.append(episode)
        self._changed.set()

    async def run(self) -> None:
        """Background task. Raises: WireError: the service refused a whole request, or cannot be reached any more."""
        while True:
            while not self._pending:
                self._changed.clear()
                await self._changed.wait()
            batch, self._pending = self._pending[:MAX_EPISODES], self._pending[MAX_EPISODES:]
            self._num_sending = len(batch)
            for result in (await self._send(batch)).values():
                kind, _, reason = result.partition(":")
                self.results[kind] += 1
                if kind == "refused":
                    log.info("an episode was refused:%s", reason)
            self._num_sending = 0
            self._changed.set()

    async def emptied(self) -> None:
        """Waits until everything is acknowledged."""
        await self.below(1)

    async def below(self, limit: int) -> None:
        """Waits until fewer than `limit` episodes are not acknowledged."""
        while self.backlog >= limit:
            self._changed.clear()
            await self._changed.wait()

    async def _send(self, batch: list[Episode]) -> dict[str, str]:
        while True:
            try:
                results = await in_thread(lambda: self._commit(batch), "commit")
            except Unreachable as error:
                self.reach.failed(error)
                await asyncio.sleep(_PAUSE_S)
            else:
                self.reach.ok()
                return results
