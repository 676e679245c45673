"""Clients elsewhere as a pool: a runner hands its episodes to requests that wait for one.

    runner ─place─► held(client, attempt) ─finish / fail─► ended(outcome or error): committed
       ▲                  │ abort, or silence for `dead_after_s`
       └── given_back ◄───┘ nothing is committed; the dataflow service offers the next attempt

An episode waits in the runner while nobody asks for one of its source. All methods run on one loop; the clock is given,
so that what happens when is tested without waiting.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from astraflow.rollout.players import Player
from astraflow.rollout.swarm.clients import Over, Records
from astraflow.types import Outcome
from astraflow.wire.app import HttpError
from astraflow.wire.swarm.messages import Ending, FinishReply, PlaysRequest

_MAX_REQUESTS = 8192  # remembered: an answer that was lost is asked for again


class Signs(Protocol):
    """Signs of life by use of an episode's key."""

    def last(self, key: str) -> float:
        """Monotonic time of the last use; now while it is used; -inf: never used."""

    def forget(self, key: str) -> None:
        """The episode is over."""


@dataclass(eq=False)
class Held:
    """One attempt in the hands of a client."""

    player: Player
    slot: int
    client: str
    deadline: float
    given: float  # monotonic
    heard: float = -math.inf  # monotonic; of its client, naming it

    @property
    def episode_id(self) -> str:
        return self.player.lease.episode_id

    @property
    def attempt(self) -> int:
        return self.player.lease.attempt


@dataclass(eq=False)
class _Ask:
    """A request that waits."""

    client: str
    count: int
    sources: frozenset[str]
    num_waiting: int = 0  # requests: one that is repeated before it was answered waits for the same
    got: list[Held] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def takes(self, source: str) -> bool:
        return len(self.got) < self.count and (not self.sources or source in self.sources)


class SwarmPool:
    """Implements `rollout.pool.Pool`. `on_asked` is called when somebody waits for more than before."""

    def __init__(
        self, dead_after_s: float, signs: Signs, on_asked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.dead_after_s, self._signs, self._on_asked, self._clock = dead_after_s, signs, on_asked, clock
        self.records = Records()
        self.over = False  # the run is: whoever asks is told
        self._asks: list[_Ask] = []
        self._held: dict[str, Held] = {}  # by episode_id
        self._slots: dict[int, Held] = {}
        self._requests: OrderedDict[tuple[str, str], _Ask] = OrderedDict()  # by client and request_id
        self._next_slot = 0

    # of a pool

    def takes(self, player: Player) -> bool:
        """Somebody waits for an episode like this one."""
        return any(ask.takes(player.lease.task.source) for ask in self._asks)

    def place(self, player: Player) -> int:
        """Give the episode to the first request that takes it."""
        ask = next(ask for ask in self._asks if ask.takes(player.lease.task.source))
        now = self._clock()
        self._next_slot += 1
        held = Held(player, self._next_slot, ask.client, now + player.timeout_s, now)
        self._held[held.episode_id] = self._slots[held.slot] = held
        ask.got.append(held)
        ask.filled.set()
        return held.slot

    def stop(self, slot: int) -> None:
        """The episode is not wanted any more; its client hears so when its next heartbeat names it."""
        if (held := self._slots.get(slot)) is not None:
            self._close(held, "cancelled", "it was cancelled by the run")
            held.player.ended(None, "cancelled: the episode was stopped")

    def fail(self, slot: int, error: str) -> None:
        """Its time is over; its client hears so when its next heartbeat names it."""
        if (held := self._slots.get(slot)) is not None:
            self._close(held, "timeout", error)
            held.player.ended(None, error)

    # of the door

    @property
    def asked(self) -> int:
        """Episodes that requests still wait for."""
        return sum(ask.count - len(ask.got) for ask in self._asks)

    @property
    def num_playing(self) -> int:
        """Episodes in the hands of clients."""
        return len(self._held)

    async def ask(self, request: PlaysRequest) -> list[Held]:
        """Up to `count` episodes; for a repeated `request_id` those of the first time that are still held. Cancelled:
        they are given back.

        Raises: HttpError: 410 the run is over.
        """
        self.refuse_when_over(request.client)
        ask, again = self._ask(request)
        if not again:
            self._asks.append(ask)
            self._on_asked()
        ask.num_waiting += 1
        try:
            async with asyncio.timeout(request.wait_s if ask in self._asks else 0):
                await ask.filled.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:  # its client went away
            if ask.num_waiting == 1:
                for held in self._still_held(ask):
                    self.give_back(held, lost=False, why="its client hung up before it was told")
            raise
        finally:
            ask.num_waiting -= 1
            if ask in self._asks and (ask.filled.is_set() or not ask.num_waiting):
                self._asks.remove(ask)
        given = self._still_held(ask)
        if not given:
            self.refuse_when_over(request.client)
        return given

    def _still_held(self, ask: _Ask) -> list[Held]:
        return [held for held in ask.got if self._slots.get(held.slot) is held]

    def _ask(self, request: PlaysRequest) -> tuple[_Ask, bool]:
        """The request, and whether it was made before."""
        named = (request.client, request.request_id)
        if request.request_id and (known := self._requests.get(named)) is not None:
            return known, True
        ask = _Ask(request.client, request.count, frozenset(request.sources))
        if request.request_id:
            self._requests[named] = ask
            while len(self._requests) > _MAX_REQUESTS:
                self._requests.popitem(last=False)
        return ask, False

    def mine(self, episode_id: str, attempt: int, client: str) -> Held:
        """The attempt, if this client plays it.

        Raises: HttpError: 404 nobody here knows the episode, 409 it is over or somebody else's.
        """
        held = self._held.get(episode_id)
        if held is not None and (held.attempt, held.client) == (attempt, client):
            held.heard = self._clock()
            return held
        over = self.records.over(episode_id, attempt)
        if over is not None:
            raise _refused(409, f"attempt={attempt} of {episode_id} is over: {over.why}; lease another episode")
        if held is None:
            raise _refused(
                404, f"episode_id={episode_id} is not played through this door (its node may have started again); "
                "lease another episode",
            )  # fmt: skip
        if held.attempt != attempt:
            raise _refused(409, f"attempt={attempt} of {episode_id} must be {held.attempt}; lease another episode")
        raise _refused(409, f"client={client} does not play {episode_id}, {held.client} does; lease one of your own")

    def end(
        self, held: Held, outcome: Outcome | None, error: str | None, *, said: object, code: str = ""
    ) -> FinishReply:
        """The client says that the episode is over: it is committed."""
        ending: Ending = "done" if error is None else "failed"
        self._forget(held)
        kept = held.player.ended(outcome, error, code)
        reply = FinishReply(result="accepted", error=kept)
        if kept is not None:
            ending = "failed"
        over = Over(held.client, ending, f"it was handed in ({kept or 'with its reward'})", said, reply)
        self.records.end(held.episode_id, held.attempt, over, code)
        return reply

    def give_back(self, held: Held, *, lost: bool, why: str, ending: Ending = "given_back") -> None:
        """Nothing of the episode is kept; it is offered again. `lost`: counts towards workflow.max_attempts."""
        self._close(held, ending, why)
        held.player.given_back(lost=lost)

    def alive(self, client: str, playing: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """The client plays these; gives those that it need not play any more."""
        now, gone = self._clock(), []
        for episode_id, attempt in playing:
            held = self._held.get(episode_id)
            if held is not None and (held.attempt, held.client) == (attempt, client):
                held.heard = now
            elif not self._handed_in(client, episode_id, attempt):  # such a heartbeat was under way meanwhile
                gone.append((episode_id, attempt))
        return gone

    def _handed_in(self, client: str, episode_id: str, attempt: int) -> bool:
        over = self.records.over(episode_id, attempt)
        return over is not None and over.client == client and over.ending in ("done", "failed", "aborted")

    def expire(self) -> None:
        """Call it now and then: give back what is in silent hands, end what took too long."""
        now = self._clock()
        for held in list(self._held.values()):
            if now > held.deadline:
                limit = f"the episode ran longer than {held.player.timeout_s:.3g} s"
                self._close(held, "timeout", limit)
                held.player.ended(None, f"timeout: {limit}")
                continue
            heard = max(held.heard, self._signs.last(held.player.key))
            if now - max(heard, held.given) > self.dead_after_s:
                why = f"it was given back after {self.dead_after_s:g} s without a heartbeat or a call"
                # One of which nothing was ever heard may never have reached its client: that is nobody's fault.
                self.give_back(held, lost=heard > -math.inf, why=why)

    def finish(self) -> None:
        """The run is over: whoever waits is told so."""
        self.over = True
        for ask in self._asks:
            ask.filled.set()

    def refuse_when_over(self, client: str) -> None:
        """Raise HttpError 410 when the run is over."""
        known = self.records.heard(client, self._clock())
        if self.over:
            known.told = True
            raise _refused(410, "run=over has no episodes any more; end the client")

    @property
    def untold(self) -> bool:
        """A client that lives has not heard that the run is over."""
        clients = self.records.clients
        return any(not clients[c].told for c in self.records.alive(self._clock(), self.dead_after_s))

    def playing(self) -> Counter[str]:
        """Client -> episodes in its hands."""
        return Counter(held.client for held in self._held.values())

    def _close(self, held: Held, ending: Ending, why: str) -> None:
        self._forget(held)
        self.records.end(held.episode_id, held.attempt, Over(held.client, ending, why))

    def _forget(self, held: Held) -> None:
        del self._slots[held.slot]
        if self._held.get(held.episode_id) is held:
            del self._held[held.episode_id]
        self._signs.forget(held.player.key)


def _refused(status: int, message: str) -> HttpError:
    return HttpError(status, message, "SwarmError")
