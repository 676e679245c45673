"""Keeps one server: changes its weights, sees when it dies or hangs, and starts it again with the newest weights.

One thing at a time, under a lock: a change of weights, or another life. Requests wait while `serving` is not set.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from astraflow.engines.served.process import Host
from astraflow.engines.served.request import Request
from astraflow.engines.served.server import Comparison, Server
from astraflow.errors import AstraFlowError, EngineError, LaunchError
from astraflow.wire.streams.web import Lost, Refused

log = logging.getLogger(__name__)
_GONE_S = 1.0
_SILENT_LOOKS = 3  # in a row without an answer, until a server counts as hung


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a server may say nothing, and how often it may be started again."""

    hang_s: float = 300.0  # without a token of any running request, or until new weights are in force
    max_restarts: int = 3  # within `window_s`
    window_s: float = 1800.0
    watch_s: float = 1.0  # between two looks
    answer_s: float = 10.0  # to a look


class Keeper:
    """Lives on the engine's loop. `server`: the one that answers now."""

    server: Server

    def __init__(
        self, host: Host, weights: Path, limits: Limits, requests: Mapping[str, Request],
        on_end: Callable[[EngineError], None],
    ) -> None:  # fmt: skip
        """`weights`: the file; `requests`: those that run, by any name; `on_end`: told why there is no server any more,
        once."""
        self.host, self.limits = host, limits
        self._weights, self._requests, self._on_end = weights, requests, on_end
        self.version, self.life, self.over = -1, 0, False
        self.last_token = time.monotonic()
        self.serving, self._lock = asyncio.Event(), asyncio.Lock()
        self._due = 0  # swaps that wait for the one that is made: requests wait for all of them
        self._starts: deque[float] = deque()
        self.gauges: dict[str, float] = {}
        self.counts = {"swaps": 0.0, "swap_s": 0.0, "restarts": 0.0}

    async def begin(self) -> int:
        """The first life; gives the longest context. Raises: AstraFlowError: there is none."""
        self.server = await self.host.start()
        limit = await self.server.look()
        self.serving.set()
        return limit

    async def swap(self, version: int, apply: Callable[[], None]) -> None:
        """`apply` puts the weights into the file, in a thread; then the server goes over to them.

        Raises: what `apply` raises, and then nothing has changed. EngineError: there is no server any more.
        """
        self._due += 1
        try:
            await self._lock.acquire()
        finally:
            self._due -= 1
        try:
            try:
                await asyncio.to_thread(apply)
            except Exception:
                self._go_on()  # the swap before has left it to this one
                raise
            began = time.monotonic()
            self.serving.clear()
            try:
                await self._change(version)
            except (Lost, Refused) as error:
                log.warning("weights %d could not be loaded (%s); the server is started again", version, error)
                self.version = version
                await self._start_again(str(error))
            self.counts["swaps"] += 1
            self.counts["swap_s"] += time.monotonic() - began
            self._go_on()
        finally:
            self._lock.release()

    async def compare(self) -> Comparison:
        """What the server's forward pass uses beside the file."""
        async with self._lock:
            return await self.server.compare(self._weights)

    async def revive(self, life: int, why: str, kill: bool = False) -> None:
        """After this the server of `life` answers, or there is another one, or `over`."""
        async with self._lock:
            if self.life != life or self.over:
                return
            how = self.host.ended()
            if how is None and not kill:
                try:
                    await self._look()
                    return  # only a connection was lost
                except (Lost, Refused) as error:
                    why, how = f"{why}; {error}", await self._how_it_ended()
            self.serving.clear()
            log.error("the server %s; %s", how or f"is lost: {why}", self.host.tail())
            try:
                await self._start_again(how or why)
            except AstraFlowError as error:
                log.debug("no other life: %s", error)  # `on_end` was told
                return
            self._go_on()

    async def watch(self) -> None:
        """Died or hung? Looks from time to time, for ever."""
        silent = 0
        while True:
            await asyncio.sleep(self.limits.watch_s)
            await self.serving.wait()
            life = self.life
            try:
                self.gauges = await self._look()
                silent = 0
            except (Lost, Refused) as error:
                silent += 1
                log.info("the server gives no answer (%s)", error)
            quiet_s = time.monotonic() - self.last_token
            if self.host.ended() is not None:
                await self.revive(life, "")
            elif silent >= _SILENT_LOOKS:
                await self.revive(life, "it answers no more", kill=True)
            elif self._requests and self.serving.is_set() and quiet_s > self.limits.hang_s:
                await self.revive(life, f"it has sampled nothing for {quiet_s:.0f} s", kill=True)
            else:
                continue
            silent = 0

    def end(self) -> None:
        """No more lives."""
        self.over = True

    async def _how_it_ended(self) -> str | None:
        """A process that was killed loses its connections a moment before it is gone."""
        end = time.monotonic() + _GONE_S
        while (how := self.host.ended()) is None and time.monotonic() < end:
            await asyncio.sleep(_GONE_S / 20)
        return how

    async def _look(self) -> dict[str, float]:
        try:
            async with asyncio.timeout(self.limits.answer_s):
                return await self.server.gauges()
        except TimeoutError:
            raise Lost("server", f"{self.limits.answer_s:g} s", "passed without an answer", "see its log") from None

    def _go_on(self) -> None:
        self.last_token = time.monotonic()
        if not self._due:
            self.serving.set()

    async def _change(self, version: int) -> None:
        """The server goes over to the file as it is now. Raises: Lost, Refused."""
        server = self.server
        try:
            async with asyncio.timeout(self.limits.hang_s):
                for request in () if server.counts else self._requests.values():
                    request.leave()  # before the pause: what comes from here on has no certain label
                sampled = await server.pause()
                for request in self._requests.values():
                    request.swapped(sampled.get(request.server_id, 0), version)
                await server.load(self._weights, version)
                self.version = version
                await server.resume()
        except TimeoutError:
            raise Lost(
                "weights", version, f"were not in force within {self.limits.hang_s:g} s", "see the server's log"
            ) from None

    async def _start_again(self, why: str) -> None:
        """Another life, with the newest weights. Under the lock, not serving.

        Raises: EngineError: too often, or it will not come up; `on_end` was told."""
        limits = self.limits
        while True:
            now = time.monotonic()
            while self._starts and now - self._starts[0] > limits.window_s:
                self._starts.popleft()
            if len(self._starts) >= limits.max_restarts:
                raise self._ended(EngineError(
                    "server", why, f"and engine.max_restarts={limits.max_restarts} within {limits.window_s:g} s are "
                    f"used up; {self.host.tail()}", f"{self.host.fix(why)}; then start the node again",
                ))  # fmt: skip
            self._starts.append(now)
            self.counts["restarts"] += 1
            self.life += 1
            for request in self._requests.values():
                request.leave()
            await self.host.stop()
            try:
                self.server = await self.host.start()
                await self.server.look()
                await self._bring_up_to_date()
                return
            except (Lost, Refused, LaunchError) as error:
                why = str(error)
                log.error("the server did not come back: %s", error)
            except EngineError as error:  # it will end so at every start
                raise self._ended(error) from error

    async def _bring_up_to_date(self) -> None:
        if self.version >= 0 and self.host.starts_with_ours:
            await self.server.label(self.version)
        elif self.version >= 0:
            await self._change(self.version)

    def _ended(self, error: EngineError) -> EngineError:
        self.over = True
        self._on_end(error)
        return error
