"""Finished episodes go to the dataflow service: whatever finished since the last send leaves in one request, and who
wants to play more asks for leases in the same one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from astraflow.errors import Unreachable, WireError
from astraflow.rollout.loop import in_thread
from astraflow.types import Episode
from astraflow.wire.messages import EpisodesReply, NextLeases
from astraflow.wire.patience import Patience, is_away

R = TypeVar("R")
Commit = Callable[[Sequence[Episode], NextLeases | None], EpisodesReply]
log = logging.getLogger("astraflow.node")
MAX_EPISODES = 256  # of one request
_APART_S = 0.15  # requests are at least so far apart: one costs the service as much as some thirty episodes
_PAUSE_S = 0.5


class Reach(Patience):
    """How long the dataflow service has been out of reach, over all loops of a node; asks again meanwhile."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s, "; episodes go on")  # one of the loops says it for all
        self._last = time.monotonic()

    async def ask(self, what: str, request: Callable[[], R]) -> R:
        """What `request` returns, which blocks and is called on a thread; again while the service is away or its disk
        is full.

        Raises: Unreachable: no loop got an answer for `limit_s`. WireError: it refused, or its disk has been full
        for this request for `limit_s`.
        """
        began = time.monotonic()
        while True:
            try:
                reply = await in_thread(request, what)
            except Unreachable as error:
                self.failed(error, self._last)
            except WireError as error:
                self._last = time.monotonic()
                if not is_away(error):
                    raise
                self.failed(error, began)
            else:
                self._last = time.monotonic()
                return reply
            await asyncio.sleep(_PAUSE_S)


class Committer:
    """Keeps finished episodes until the dataflow service has them. `results`: "accepted", "duplicate", "refused"."""

    def __init__(self, commit: Commit, reach: Reach) -> None:
        """`commit` blocks; it is called on a thread of its own."""
        self._commit, self.reach = commit, reach
        self._more: tuple[NextLeases, int] | None = None  # to be asked for beside the last of so many episodes
        self._reply: EpisodesReply | None = None  # to the request that asked
        self._pending: list[Episode] = []
        self._num_sending = 0
        self._num_done = 0
        self._wanted = 0  # somebody waits until so many are done
        self._changed, self._hurry = asyncio.Event(), asyncio.Event()
        self.results: Counter[str] = Counter()

    @property
    def backlog(self) -> int:
        """Episodes not yet acknowledged."""
        return len(self._pending) + self._num_sending

    def add(self, episode: Episode) -> None:
        """Send it soon, with others that end soon after."""
        self._pending.append(episode)
        self._changed.set()

    async def run(self) -> None:
        """Background task. Raises: WireError: the service refused a whole request, or cannot be reached any more."""
        sent = 0.0
        while True:
            while not self._pending:
                self._changed.clear()
                await self._changed.wait()
            await self._gather(sent + _APART_S)
            sent = time.monotonic()
            batch, self._pending = self._pending[:MAX_EPISODES], self._pending[MAX_EPISODES:]
            self._num_sending = len(batch)
            more = self._more_beside(batch)
            reply = await self.reach.ask("commit", lambda: self._commit(batch, more))  # noqa: B023
            if more is not None:
                self._reply = reply
            for result in reply.results.values():
                kind, _, reason = result.partition(":")
                self.results[kind] += 1
                if kind == "refused":
                    log.info("an episode was refused:%s", reason)
            self._num_sending = 0
            self._num_done += len(batch)
            self._changed.set()

    def _more_beside(self, batch: Sequence[Episode]) -> NextLeases | None:
        if self._more is None or self._num_done + len(batch) < self._more[1]:
            return None
        more, self._more = self._more[0], None
        return more

    async def _gather(self, until: float) -> None:
        """Waits for more, until a request is full, somebody waits for it or the time (monotonic) has come."""
        if len(self._pending) >= MAX_EPISODES or self._num_done < self._wanted:
            return
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._hurry.wait()

    async def exchange(self, n: int) -> EpisodesReply | None:
        """`settled`, and the reply to the request that also asked for `n` leases; None: there was nothing to send, so
        nothing was asked."""
        self._reply = None
        self._more = (NextLeases(uuid.uuid4().hex, n), self._num_done + self.backlog) if self._pending else None
        try:
            await self.settled()
        finally:
            self._more = None
        return self._reply

    async def settled(self) -> None:
        """Send what there is now; waits until it is acknowledged."""
        count = self._num_done + self.backlog
        self._wanted = max(self._wanted, count)
        self._hurry.set()
        while self._num_done < count:
            self._changed.clear()
            await self._changed.wait()
