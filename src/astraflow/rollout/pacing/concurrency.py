"""How many episodes a node plays at once: as many as its engines carry, between two bounds.

| every LOOK_S, the engines are | by                                                      | the limit then        |
|-------------------------------|---------------------------------------------------------|-----------------------|
| pressed                       | memory of keys and values above 90 %, rows that lost    | falls by an eighth    |
|                               | their place for it, or twice a queue of a quarter       |                       |
| easy                          | all of them below 75 %, nothing waits, limit reached    | rises by an eighth    |
| neither                       |                                                         | stays                 |

It starts at the lower bound: an engine that is filled slowly never has to throw out what it began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from astraflow.contracts import Engine
from astraflow.rollout.runner import Runner

LOOK_S = 1.0
FULL, EASY, QUEUE = 0.9, 0.75, 0.25
_SHARE = 8


class Concurrency:
    """Pure. `least` 0: always `most`."""

    def __init__(self, most: int, least: int = 0) -> None:
        self.limit = min(least, most) or most
        self._most, self._least = most, min(least, most) or most
        self._preempted: list[float] = []
        self._queued = False

    @property
    def adapts(self) -> bool:
        """It depends on the load."""
        return self._least < self._most

    def look(self, engines: Sequence[Mapping[str, float]], in_play: int) -> int:
        """The limit from now on. `engines`: `Engine.stats()` of each; gauges that one has not are taken for 0."""
        preempted = [stats.get("preempted", 0.0) for stats in engines]
        lost = bool(self._preempted) and sum(preempted) > sum(self._preempted)
        usage = max((stats.get("kv_usage", 0.0) for stats in engines), default=0.0)
        waiting = [_waiting(stats) for stats in engines]
        queued = any(w > QUEUE * stats["running"] for w, stats in zip(waiting, engines, strict=True))
        step = max(1, self.limit // _SHARE)
        if usage > FULL or lost or (queued and self._queued):
            self.limit = max(self._least, self.limit - step)
        elif usage < EASY and not any(waiting) and in_play >= self.limit:
            self.limit = min(self._most, self.limit + step)
        self._preempted, self._queued = preempted, queued
        return self.limit


async def adapt(load: Concurrency, runner: Runner, engines: Sequence[Engine]) -> None:
    """Forever: `runner` plays as many episodes as `load` says."""
    while True:
        await asyncio.sleep(LOOK_S)
        limit = load.look([engine.stats() for engine in engines], runner.num_in_play)
        if limit != runner.capacity:
            runner.resize(limit)


def _waiting(stats: Mapping[str, float]) -> float:
    """In the engine and in a server behind it."""
    return stats["waiting"] + stats.get("server_waiting", 0.0)
