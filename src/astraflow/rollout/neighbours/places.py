"""Other nodes whose engines this node may ask: who they are, how near, how busy, and whether they live.

| learnt from                           | what                                              | when                   |
|---------------------------------------|---------------------------------------------------|------------------------|
| the data service, with each heartbeat | who has an engine of which policy, and its host   | `dataflow.heartbeat_s` |
| a look at each                        | versions, load, round trip; that it lives         | `LOOK_S`, and at news  |
| a request that is lost                | that it may not live: nothing until the next look | at once                |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from astraflow.wire.app import is_loopback
from astraflow.wire.messages import Offer
from astraflow.wire.streams.engines import EngineState, Lent
from astraflow.wire.streams.web import Lost, Refused, Web

log = logging.getLogger("astraflow.node")
LOOK_S = 1.0
_ANSWER_S = 5.0
_MISSED = 2  # looks in a row without an answer, until what is asked there is asked elsewhere
_NEAR_S = 0.005  # round trips below it are all the same


class Place:
    """One node."""

    def __init__(self, url: str, host: str, token: str | None) -> None:
        self.url, self.host, self.web = url, host, Web(url, token)
        self.engines: dict[str, str] = {}  # policy -> "<engine>@<node>"
        self.alive, self.gone = False, False  # it answered the last look; it is not offered any more
        self.missed, self.round_trip_s = 0, 0.0
        self.asks: dict[asyncio.Task[None], str] = {}  # requests of this node that run there -> policy
        self._states: dict[str, list[EngineState]] = {}
        self._others: dict[str, float] = {}  # policy -> requests of others there, at the last look

    def saw(self, lent: Lent, round_trip_s: float) -> bool:
        """It answered a look. True: other versions are in force than before, or it did not live."""
        before = (self.alive, _versions(self._states))
        self.round_trip_s = (self.round_trip_s or round_trip_s) / 2 + round_trip_s / 2
        self.alive, self.missed, self._states = True, 0, lent.policies
        for policy, states in lent.policies.items():
            load = sum(state.running + state.waiting for state in states)
            self._others[policy] = max(0.0, load - self._asked(policy))
        return before != (True, _versions(self._states))

    def state(self, policy: str, number: int) -> EngineState | None:
        """Of one engine as it was last seen; None: it is not there, or the node does not answer."""
        states = self._states.get(policy, []) if policy in self.engines and self.alive else []
        return states[number] if number < len(states) else None

    def cost(self, policy: str, number: int, host: str) -> tuple[bool, bool, int, float]:
        """Lower is nearer: on this host, nothing waits there, the round trip (in powers of two), how much runs."""
        state = self.state(policy, number)
        grade = max(0, math.ceil(math.log2(max(self.round_trip_s, 1e-9) / _NEAR_S)))
        load = self._others.get(policy, 0.0) + self._asked(policy)
        return self.host != host, state is not None and state.waiting > 0, grade, load

    def _asked(self, policy: str) -> int:
        return sum(each == policy for each in self.asks.values())


class Neighbours:
    """Lives on the node's loop."""

    def __init__(self, policies: Sequence[str], host: str, token: str | None, on_change: Callable[[], None]) -> None:
        """`policies`: that this node lacks; `on_change`: another version can be had, or another engine."""
        self.policies, self.host, self._token, self._on_change = list(policies), host, token, on_change
        self._places: dict[str, Place] = {}  # by URL
        self._news, self._changed = asyncio.Event(), asyncio.Event()

    def hear(self, offers: Mapping[str, Sequence[Offer]]) -> None:
        """The data service says who has what."""
        engines: dict[str, dict[str, str]] = {}
        for policy, offered in offers.items():
            for offer in offered:
                if is_loopback(urlsplit(offer.url).hostname or "") and offer.host != self.host:
                    continue  # there it would be somebody else
                engines.setdefault(offer.url, {})[policy] = offer.engine
                if offer.url not in self._places:
                    self._places[offer.url] = Place(offer.url, offer.host, self._token)
                    self._news.set()
        for url, place in list(self._places.items()):
            place.engines = engines.get(url, {})
            if not place.engines:
                del self._places[url]
                place.gone = True
                self._drop(place)

    def nearest(self, policy: str, number: int, version: int, kind: str = "") -> Place | None:
        """Of those that fit."""
        fitting = [place for place in self._places.values() if self.fits(place, policy, number, version, kind)]
        return min(fitting, key=lambda place: place.cost(policy, number, self.host), default=None)

    def fits(self, place: Place, policy: str, number: int, version: int, kind: str = "") -> bool:
        """Its engine can be asked, has at least this version, and is of this kind where one is given."""
        state = place.state(policy, number)
        if state is None or state.version < version:
            return False
        return not kind or kind_of(place.engines[policy]) == kind

    def states(self, policy: str, number: int) -> list[EngineState]:
        """Of all engines of it that can be asked."""
        found = (place.state(policy, number) for place in self._places.values())
        return [state for state in found if state is not None]

    def suspect(self, place: Place) -> None:
        """A request was lost there: ask nothing more of it before it has answered a look."""
        place.alive = False
        self._news.set()

    async def change(self) -> None:
        """Waits until something can be asked that could not be before."""
        await self._changed.wait()

    async def watch(self) -> None:
        """Background task: looks at all of them, for ever."""
        while True:
            self._news.clear()
            looks = [self._look(place) for place in self._places.values()]
            if any(await asyncio.gather(*looks)):
                self._changed.set()
                self._changed = asyncio.Event()
                self._on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _look(self, place: Place) -> bool:
        began = time.monotonic()
        try:
            lent = msgspec.json.decode(await place.web.ask("GET", "/engines", within_s=_ANSWER_S), type=Lent)
        except (Lost, Refused, msgspec.DecodeError) as error:
            place.alive, place.missed = False, place.missed + 1
            level = logging.WARNING if isinstance(error, Refused) else logging.INFO
            log.log(level if place.missed == 1 else logging.DEBUG, "%s does not answer: %s", place.url, error)
            if place.missed >= _MISSED:
                self._drop(place)
            return False
        return not place.gone and place.saw(lent, time.monotonic() - began)

    def _drop(self, place: Place) -> None:
        """What was asked of it is asked elsewhere."""
        place.alive = False
        for ask in list(place.asks):
            ask.cancel()


def kind_of(engine: str) -> str:
    """Of "<engine>@<node>", without the node."""
    return engine.partition("@")[0]


def _versions(states: Mapping[str, Sequence[EngineState]]) -> dict[str, list[int]]:
    return {policy: [state.version for state in each] for policy, each in states.items()}
