"""What other threads ask of an engine thread, and the one place that decides who answers a future.

A request or errand is pending from `add...` until `finish...` or `fail` takes it out under the lock, so every future is
answered exactly once, also when `close` races with a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from astraflow.engines.local.rows import Request
from astraflow.errors import AstraFlowError, EngineError
from astraflow.types import Generation

_QUIET_S = 0.001
_BURST = 64  # requests after which a gathering thread looks again


@dataclass(slots=True, eq=False)
class Errand:
    """Something to do with the weights between two decode steps. `future`: what `act` returns, or its ModelError."""

    act: Callable[[], Any]
    future: Future[Any]


@dataclass(slots=True)
class Work:
    """One turn of the engine thread, in this order."""

    cancelled_waiting: list[Request]  # never started
    cancelled_running: bool  # some running request has `cancelled` set
    errands: list[Errand]
    admitted: list[Request]


class Inbox:
    """Thread-safe. After `fail`, everything that comes in fails at once with the same error."""

    def __init__(self, gather_s: float = 0.0) -> None:
        self._gather_s = gather_s
        self._wake = threading.Condition()
        self._pending: dict[tuple[int, str], Request] = {}  # waiting and running, by policy and id
        self._waiting: deque[Request] = deque()
        self._errands: deque[Errand] = deque()
        self._cancels = False
        self._error: EngineError | None = None
        self.ended: Future[EngineError] = Future()
        self.ended.set_running_or_notify_cancel()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request; its future fails if the engine has ended or the id is in use."""
        with self._wake:
            error = self._error
            if error is None and request.name in self._pending:
                error = EngineError("request_id", request.request_id, "is in use", "give every request its own id")
            if error is None:
                self._pending[request.name] = request
                self._waiting.append(request)
                self._wake.notify()
        if error is not None:
            request.future.set_exception(error)

    def add_errand(self, errand: Errand) -> None:
        """Queue it; the future fails if the engine has ended."""
        with self._wake:
            error = self._error
            if error is None:
                self._errands.append(errand)
                self._wake.notify()
        if error is not None:
            errand.future.set_exception(error)

    def cancel(self, policy: int, request_id: str) -> None:
        """Mark a pending request; unknown ids are finished ones."""
        with self._wake:
            request = self._pending.get((policy, request_id))
            if request is not None:
                request.cancelled = self._cancels = True
                self._wake.notify()

    def take(self, room: int, busy: bool) -> Work | None:
        """What to do now, admitting at most `room`. Waits for something to do when not `busy`, and for a burst of
        requests to pass. None: the engine has ended."""
        with self._wake:
            while not (busy or self._error or self._errands or self._cancels or self._is_ready()):
                self._wake.wait(self._waiting[0].ready_s - time.monotonic() if self._waiting else None)
            self._gather(room)
            if self._error is not None:
                return None
            dropped: list[Request] = []
            running_too = self._cancels
            if self._cancels:
                self._cancels = False
                dropped = [request for request in self._waiting if request.cancelled]
                self._waiting = deque(request for request in self._waiting if not request.cancelled)
            admitted: list[Request] = []
            while len(admitted) < room and self._is_ready():
                admitted.append(self._waiting.popleft())
            return Work(dropped, running_too, list(self._errands), admitted)

    def rest(self, seconds: float) -> None:
        """Nothing is done for so long, unless the engine ends."""
        with self._wake:
            self._wake.wait_for(lambda: self._error is not None, seconds)

    def finish(self, finished: Sequence[tuple[Request, Generation]]) -> None:
        """Answer requests, all in one go."""
        with self._wake:
            mine = [(r, g) for r, g in finished if self._pending.pop(r.name, None) is not None]
        for request, generation in mine:
            request.future.set_result(generation)

    def finish_errand(self, errand: Errand, result: Any, error: AstraFlowError | None = None) -> None:
        """Answer it."""
        with self._wake:
            if errand not in self._errands:
                return
            self._errands.remove(errand)
        if error is None:
            errand.future.set_result(result)
        else:
            errand.future.set_exception(error)

    def fail(self, error: EngineError) -> None:
        """End the engine: everything pending fails with `error`, once `ended` says so. Only the first call counts."""
        with self._wake:
            if self._error is not None:
                return
            self._error = error
            futures: list[Future[Any]] = [request.future for request in self._pending.values()]
            futures += [errand.future for errand in self._errands]
            self._pending.clear()
            self._waiting.clear()
            self._errands.clear()
            self._wake.notify()
        self.ended.set_result(error)
        for future in futures:
            future.set_exception(error)

    def _gather(self, room: int) -> None:
        """While requests come in one after the other, let them: they start together, and the thread that brings them
        is not slowed by this one. Ends after `gather_s`, or when none came for `_QUIET_S`."""
        deadline = time.monotonic() + self._gather_s
        known = -1 if self._waiting else 0
        while self._error is None and known < len(self._waiting) < room and time.monotonic() < deadline:
            known = len(self._waiting)
            self._wake.wait_for(lambda: len(self._waiting) > known + _BURST, _QUIET_S)  # noqa: B023

    def _is_ready(self) -> bool:
        return bool(self._waiting) and (not self._waiting[0].ready_s or self._waiting[0].ready_s <= time.monotonic())
