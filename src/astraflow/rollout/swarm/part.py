"""The swarm side of a node: its door, a runner of its own over the node's gateway, and the leases that go back.

clients ─► door ─► pool ─asks─► (the node leases as much) ─► runner ─► pool ─► a client's request
                                                                └─► back to the dataflow service
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from astraflow.contracts import Engine
from astraflow.rollout.gateway.app import create_app
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.runner import Runner, RunnerOptions
from astraflow.rollout.swarm.door import DoorFacts, SignsOfLife, create_door
from astraflow.rollout.swarm.pool import SwarmPool
from astraflow.rollout.swarm.trials import TrialOptions, Trials
from astraflow.types import Episode, EpisodeLease
from astraflow.wire.app import serve

log = logging.getLogger("astraflow.node")
_PULSE_S = 0.25
_PARK_S = 10.0  # what no client asks for goes back to the dataflow service after so long
_TELL_EVERY_S = 30.0
_VERSION, _MAX_VERSIONS = re.compile(r"[\w.+-]{1,32}"), 8  # said by clients, names of metrics
_LINGER_S = 6.0  # of a door once the run is over, for clients that have not heard it
Return = tuple[str, int, bool]
"""Episode id, attempt, whether it counts as lost."""


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """Of one door."""

    node_id: str
    dead_after_s: float
    max_episodes: int  # in play at once, through this door
    max_episode_tokens: int
    step_timeout_s: float = 0.0
    token: str | None = None
    trials: TrialOptions | None = None  # None: nobody may try a workflow


class Swarm:
    """All methods run on the node's loop."""

    def __init__(
        self,
        options: SwarmOptions,
        gateway: Gateway,
        engines: Mapping[str, Engine],
        on_episode: Callable[[Episode], None],
        newest: Callable[[str], int],
    ) -> None:
        self._options = options
        self._signs = SignsOfLife(gateway)
        self.pool = SwarmPool(options.dead_after_s, self._signs, self._on_asked, asyncio.get_running_loop().time)
        plays = RunnerOptions(
            options.node_id, options.max_episodes, max_tokens=options.max_episode_tokens, park_s=_PARK_S,
            step_timeout_s=options.step_timeout_s,
        )  # fmt: skip
        self.runner = Runner(plays, gateway, engines, self.pool, on_episode, newest, self._on_given_back)
        more = Trials(gateway, engines, options.trials).routes() if options.trials is not None else []
        facts = DoorFacts(policies=gateway.policies, waiting=self._waiting, more=more)
        self.door = create_door(self.pool, create_app(gateway), self._signs, facts, options.token)
        self._changed = asyncio.Event()
        self._returns: list[Return] = []
        self._num_sending = 0
        self._told = 0.0

    @property
    def wanted(self) -> int:
        """Episodes that clients wait for and that are not leased yet."""
        coming = sum(self.pool.takes(play) for play in self.runner.waiting)
        return max(0, min(self.pool.asked - coming, self.runner.free))

    async def asked(self) -> None:
        """Waits until an episode is wanted."""
        while not self.wanted:
            self._changed.clear()
            await self._changed.wait()

    async def settled(self) -> None:
        """Waits until everything that goes back has been sent back."""
        while self._returns or self._num_sending:
            self._changed.clear()
            await self._changed.wait()

    async def send_back(self, send: Callable[[Sequence[Return]], Awaitable[None]]) -> None:
        """Background task: what goes back, as soon as it does."""
        while True:
            while not self._returns:
                self._changed.clear()
                await self._changed.wait()
            returns, self._returns = self._returns, []
            self._num_sending = len(returns)
            await send(returns)
            self._num_sending = 0
            self._changed.set()

    async def watch(self) -> None:
        """Background task: silent clients, late episodes, and episodes that nobody asks for."""
        while True:
            await asyncio.sleep(_PULSE_S)
            self.pool.expire()
            self.runner.start_waiting()
            self._changed.set()
            self._warn()

    async def serve(self, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
        """Background task: the door, until it is cancelled."""
        await serve(self.door, sock, on_ready, asyncio.Event(), grace_s=1.0)

    async def tell_over(self) -> None:
        """The run is over: returns when every client has heard so, or has had the time to."""
        self.pool.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while self.pool.untold:
                    await asyncio.sleep(_PULSE_S)

    def stats(self) -> dict[str, float]:
        """`swarm/...`: gauges clients, clients/<version>, playing, asked, waiting; counters episodes_<ending>."""
        records, now = self.pool.records, asyncio.get_running_loop().time()
        alive = [records.clients[c] for c in records.alive(now, self._options.dead_after_s)]
        stats = {
            "swarm/clients": float(len(alive)),
            "swarm/playing": float(self.pool.num_playing),
            "swarm/asked": float(self.pool.asked),
            "swarm/waiting": float(self.runner.num_waiting),
        }
        versions = Counter(c.version if _VERSION.fullmatch(c.version) else "unknown" for c in alive)
        for version, count in versions.most_common(_MAX_VERSIONS):
            stats[f"swarm/clients/{version}"] = float(count)
        return stats | {f"swarm/episodes_{ending}": float(n) for ending, n in records.endings.items()}

    def _waiting(self) -> dict[str, int]:
        return dict(Counter(play.lease.task.source for play in self.runner.waiting))

    def _on_asked(self) -> None:
        self._changed.set()
        self.runner.start_waiting()

    def _on_given_back(self, lease: EpisodeLease, lost: bool) -> None:
        self._returns.append((lease.episode_id, lease.attempt, lost))
        self._changed.set()

    def _warn(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._told < _TELL_EVERY_S or not self.pool.asked:
            return
        for source, count in self.runner.parked(0.5 * _PARK_S).items():
            self._told = now
            log.warning("%d episodes of source %r wait for a client that plays them", count, source)
