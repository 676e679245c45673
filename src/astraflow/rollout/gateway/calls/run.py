"""One request on its way: the samples that it asked for, what they have said, and who reads it.

A request may be read several times (a retry reads what the first try began), whole or as a stream. It goes on while
somebody reads; `Gateway` ends it when nobody does any more.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from astraflow.rollout.gateway.calls.events import Event, Started
from astraflow.rollout.gateway.contexts import Prompt
from astraflow.rollout.gateway.dialect import ChatCompletion, ChatRequest
from astraflow.types import Generation, Sampling

if TYPE_CHECKING:
    from astraflow.rollout.gateway.episode import PolicyCapture
    from astraflow.rollout.gateway.reading.live import LiveReply


class Sample(msgspec.Struct, eq=False):
    """One choice of a request: a call of its own, with a request of its own to the engine."""

    choice: int
    index: int  # of the call
    request_id: str
    sampling: Sampling
    live: LiveReply | None  # None: it is read at the end as a whole
    generation: Generation | None = None  # what is captured of it, once that is certain


class Run:
    """All samples of one request. Lives on the gateway's event loop."""

    __slots__ = (
        "_waiters", "capture", "created", "deadline", "ended_s", "events", "forgiven", "outcome", "prompt", "readers",
        "request", "samples", "shown",
    )  # fmt: skip

    def __init__(self, request: ChatRequest, capture: PolicyCapture, prompt: Prompt) -> None:
        self.request, self.capture, self.prompt = request, capture, prompt
        self.samples: list[Sample] = []
        self.events: list[Event] = []  # of a stream, from its start
        self.outcome: ChatCompletion | Exception | None = None  # None: it runs
        self.created = int(time.time())
        self.ended_s = 0.0  # on a clock that never goes back
        self.deadline: asyncio.TimerHandle | None = None
        self.readers = 0
        self.shown = False  # a stream has given a piece to somebody
        self.forgiven = False  # a retry that follows from its error was seen
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def id(self) -> str:
        """Of the completion."""
        return f"chatcmpl-{self.samples[0].request_id}"

    @property
    def failed(self) -> bool:
        """It ended by an error."""
        return isinstance(self.outcome, Exception)

    def started(self) -> Started:
        """The first event of its stream."""
        return Started(self.id, self.created, self.request.model, len(self.prompt.ids), len(self.samples))

    def publish(self, events: list[Event]) -> None:
        """More has been said."""
        self.events += events
        if self._waiters:
            self._wake()

    def settle(self, outcome: ChatCompletion | Exception) -> None:
        """It is over."""
        self.outcome, self.ended_s = outcome, time.monotonic()
        if self._waiters:
            self._wake()

    async def change(self) -> None:
        """Returns after the next `publish` or `settle`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
