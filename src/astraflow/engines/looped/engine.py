"""What `remote` and the served engines share: each request is a task on one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import numpy as np

from astraflow.contracts import TokenSink
from astraflow.engines.looped.thread import LoopThread
from astraflow.errors import AstraFlowError, EngineError
from astraflow.types import FinishReason, Generation, Sampling

log = logging.getLogger(__name__)
_END_S = 10.0  # for tasks that were cancelled


class Pending(Protocol):
    """A request on its way; it lives on the engine's loop."""

    request_id: str
    future: Future[Generation]
    task: asyncio.Task[None] | None

    def generation(self, reason: FinishReason) -> Generation:
        """What there is of it."""


R = TypeVar("R", bound=Pending)


class LoopEngine(ABC, Generic[R]):
    """Half of the Engine contract: requests, `ended` and `close`. Methods without an underscore may be called by any
    thread, the others run on the loop."""

    def __init__(self, name: str, max_context: int) -> None:
        """`name`: of the thread. `max_context`: 0: not known yet."""
        self._max_context = max_context
        self._requests: dict[str, R] = {}
        self._error: EngineError | None = None
        self._counts = dict.fromkeys(("busy_s", "sampled_tokens", "prefill_tokens", "requests"), 0.0)
        self._busy_since = 0.0
        self.ended: Future[EngineError] = Future()
        self.ended.set_running_or_notify_cancel()
        self._loop = LoopThread(name)

    @abstractmethod
    def _checked(
        self, request_id: str, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, future: Future[Generation],
        on_tokens: TokenSink | None,
    ) -> R:  # fmt: skip
        """In the thread that asks. Raises: EngineError: it cannot be asked for."""

    @abstractmethod
    async def _answer(self, request: R) -> Generation:
        """One request to its end. Raises: EngineError: it fails."""

    @abstractmethod
    async def _close(self) -> None:
        """Release what the engine holds; no task of it runs any more."""

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """Queue one generation."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        try:
            request = self._checked(request_id, prompt_ids, sampling, future, on_tokens)
        except EngineError as error:
            future.set_exception(error)
            return future
        if not self._loop.call(self._admit, request):
            future.set_exception(self._why_ended())
        return future

    def cancel(self, request_id: str) -> None:
        """End a request with what it has."""
        self._loop.call(self._cancel, request_id)

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""
        return self._max_context

    def close(self) -> None:
        """Closing twice is a no-op."""
        self._loop.stop(self._end)

    def _busy_s(self) -> float:
        return self._counts["busy_s"] + (time.monotonic() - self._busy_since if self._requests else 0.0)

    def _why_ended(self) -> EngineError:
        return self._error or EngineError("engine", "ended", "serves no more requests", "start a new one")

    def _admit(self, request: R) -> None:
        error = self._error
        if error is None and request.request_id in self._requests:
            error = EngineError("request_id", request.request_id, "is in use", "give every request its own id")
        if error is not None:
            request.future.set_exception(error)
            return
        if not self._requests:
            self._busy_since = time.monotonic()
        self._requests[request.request_id] = request
        self._counts["requests"] += 1
        request.task = asyncio.create_task(self._play(request))

    async def _play(self, request: R) -> None:
        try:
            generation = await self._answer(request)
        except EngineError as error:
            self._finish(request, error)
        except Exception as error:  # whatever it is, somebody waits for the future
            log.exception("a request ends")
            self._finish(request, EngineError("request", type(error).__name__, f"ended ({error})", "see the log"))
        else:
            self._finish(request, generation)

    def _cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.task is not None:
            request.task.cancel()
            self._finish(request, request.generation("cancelled"))

    def _finish(self, request: R, how: Generation | AstraFlowError) -> None:
        if self._requests.pop(request.request_id, None) is None:
            return
        if not self._requests:
            self._counts["busy_s"] += time.monotonic() - self._busy_since
        if isinstance(how, AstraFlowError):
            request.future.set_exception(how)
        else:
            request.future.set_result(how)

    def _fail(self, error: EngineError) -> None:
        """Everything pending fails, once `ended` says so. Only the first call counts."""
        if self._error is not None:
            return
        self._error = error
        self.ended.set_result(error)
        for request in list(self._requests.values()):
            if request.task is not None:
                request.task.cancel()
            self._finish(request, error)

    async def _end(self) -> None:
        self._fail(EngineError("engine", "closed", "serves no more requests", "start a new one"))
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)
        await self._close()
