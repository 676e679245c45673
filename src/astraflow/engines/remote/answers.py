"""Where a verdict comes from: it is known, it is on its way for somebody else, or the service is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from astraflow.engines.remote.budget import Budget
from astraflow.engines.remote.service import Service
from astraflow.engines.remote.verdicts import Verdict, Verdicts, key_of

Kept = Literal["greedy", "all", "none"]


@dataclass(eq=False)
class _Flight:
    """One verdict on its way, and how many wait for it."""

    task: asyncio.Task[Verdict]
    waiting: int = 0


class Answers:
    """Lives on one event loop. `num_known`: those for which the service was not asked."""

    def __init__(self, url: str, service: Service, budget: Budget, verdicts: Verdicts, keep: Kept) -> None:
        """`keep`: which verdicts hold for equal requests: those at temperature 0, all, none."""
        self._url, self._service, self._budget = url, service, budget
        self._verdicts, self._keep = verdicts, keep
        self._flights: dict[str, _Flight] = {}
        self.num_known = 0
        self.answered = False  # the service has given a verdict

    async def of(self, episode: str, body: Mapping[str, Any]) -> Verdict:
        """Raises: EngineError: there is none. Spent: the service may not be asked."""
        if self._keep == "none" or (self._keep == "greedy" and body.get("temperature") != 0):
            self._budget.ask(episode)
            return await self._ask(episode, body)
        key = key_of(self._url, body)
        known = self._verdicts.find(key)
        if known is not None:
            self.num_known += 1
            return known
        flight = self._flights.get(key)
        if flight is None:
            self._budget.ask(episode)
            flight = self._flights[key] = _Flight(asyncio.create_task(self._ask(episode, body)))
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        else:
            self.num_known += 1
        return await self._wait(key, flight)

    async def _wait(self, key: str, flight: _Flight) -> Verdict:
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._flights.pop(key, None)  # nobody may join it any more
                flight.task.cancel()

    def _landed(self, key: str, task: asyncio.Task[Verdict]) -> None:
        if (flight := self._flights.get(key)) is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled() and task.exception() is None:
            self._verdicts.keep(key, task.result())

    async def _ask(self, episode: str, body: Mapping[str, Any]) -> Verdict:
        verdict = await self._service.ask(body)
        self.answered = True
        self._budget.took(episode, verdict.tokens)
        return verdict
