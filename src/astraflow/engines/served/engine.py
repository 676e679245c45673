"""An engine that is a server: requests go there and stream back, weights go there through a file, and a server that
dies or hangs is started again with the newest weights.

    submit ──► task per request:   wait until serving ─► stream ─► label, hand out ─► done
                                            ▲               │ lost
    load_weights ─► file ─► pause ─► count ─► load ─► resume │      one at a time: `keeper`
    watch: died, hung? ─────────────────────► start again ◄──┘

Everything below the contract's methods runs on one event loop in one thread. A request whose server is lost keeps its
tokens and goes on after them in the next life.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np

from astraflow.contracts import TokenSink
from astraflow.engines.looped.engine import LoopEngine
from astraflow.engines.requests import check_sampling, checked_prompt
from astraflow.engines.served.keeper import Keeper, Limits
from astraflow.engines.served.process import Host
from astraflow.engines.served.request import Request
from astraflow.engines.served.server import Ask, Model
from astraflow.engines.served.shadow import Shadow
from astraflow.errors import EngineError, ModelError
from astraflow.types import Adapter, EffectiveWeights, FinishReason, Generation, Sampling
from astraflow.wire.streams.web import Lost

R = TypeVar("R")
log = logging.getLogger(__name__)
_LOSSES = 5  # of a request, until it fails with the server that is lost


class ServedEngine(LoopEngine[Request]):
    """Passes the conformance suite of the Engine contract with every `Server`."""

    def __init__(
        self, host: Host, shadow: Shadow, model: Model, limits: Limits, *, delay_s: float = 0.0,
        check: Callable[[Sampling], None] = check_sampling,
    ) -> None:  # fmt: skip
        """Blocks until the server answers. `delay_s`: before each request; `check`: raises EngineError for sampling
        that the server cannot do. Raises: AstraFlowError: there is no server; nothing is left of it."""
        self._shadow, self._model, self._delay_s, self._check = shadow, model, delay_s, check
        self._errands: set[Future[Any]] = set()
        super().__init__("astraflow-served", model.max_context)
        self._keeper = Keeper(host, shadow.path, limits, self._requests, self._fail)
        try:
            self._loop.wait_for(self._begin)
        except BaseException:
            self.close()
            raise

    def _checked(
        self, request_id: str, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, future: Future[Generation],
        on_tokens: TokenSink | None,
    ) -> Request:  # fmt: skip
        ids = checked_prompt(prompt_ids, self._max_context, self._model.vocab_size)
        self._check(sampling)
        return Request(
            request_id, ids, sampling, min(sampling.max_tokens, self._max_context - ids.size), future, on_tokens
        )  # fmt: skip

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Running requests stop at a token and go on under `version`. Tensors that do not fit change nothing and fail
        the future with ModelError."""

        async def swap() -> int:
            await self._keeper.swap(version, lambda: self._shadow.load(tensors, adapter))
            return version

        return self._errand(swap)

    def effective_weights(self) -> Future[EffectiveWeights]:
        """The server compares what its forward pass uses with what it was given; checksum "" where it cannot."""
        return self._errand(self._effective)

    @property
    def version(self) -> int:
        """The version in force."""
        return self._keeper.version

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the contract; restarts; swap_s: seconds in which nothing was sampled because of new
        weights; what the server says of itself: server_running, server_waiting, kv_usage."""
        requests = list(self._requests.values())
        waiting = sum(not request.server_id for request in requests)
        counts = {**self._counts, **self._keeper.counts, **self._keeper.gauges, "busy_s": self._busy_s()}
        return {**counts, "running": float(len(requests) - waiting), "waiting": float(waiting)}

    # on the loop

    async def _begin(self) -> None:
        limit, asked = await self._keeper.begin(), self._model.max_context
        if asked > limit:
            raise ModelError(
                "engine.max_context", asked, f"must be at most {limit}, the server's limit", "use 0 for the server's"
            )
        self._max_context = asked or limit
        asyncio.create_task(self._keeper.watch()).add_done_callback(self._watch_ended)

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the watch of the server ends", exc_info=error)
            self._fail(EngineError("engine", type(error).__name__, f"ended its watch ({error})", "see its log"))

    def _admit(self, request: Request) -> None:
        if not self._requests:
            self._keeper.last_token = time.monotonic()
        super()._admit(request)

    async def _answer(self, request: Request) -> Generation:
        keeper = self._keeper
        self._counts["prefill_tokens"] += request.prompt_ids.size
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        while True:
            await keeper.serving.wait()
            life = keeper.life
            try:
                reason = await self._stream(request)
            except Lost as error:
                left = request.has_left
                request.leave()
                if left:
                    continue  # the server was told to end it
                request.losses += 1
                await keeper.revive(life, str(error))
                if request.losses >= _LOSSES:
                    raise
            else:
                if reason is not None:
                    return request.generation(reason)

    async def _stream(self, request: Request) -> FinishReason | None:
        """Its tokens as they come; None: the server was told to end it, and what is left has to be asked for."""
        if len(request.token_ids) >= request.max_tokens:
            return "length"
        request.ask(self._keeper.version)
        known = np.concatenate([request.prompt_ids, np.array(request.token_ids, np.int32)])
        ask = Ask(
            request.server_id, known, request.sampling, request.max_tokens - len(request.token_ids),
            [*self._model.stop_ids, *request.sampling.stop_token_ids],
        )  # fmt: skip
        async with aclosing(self._keeper.server.generate(ask)) as pieces:
            async for piece in pieces:
                if request.has_left:
                    return None
                request.add(piece)
                self._counts["sampled_tokens"] += len(piece.token_ids)
                self._keeper.last_token = time.monotonic()
                if piece.finish_reason is not None:
                    return "stop" if piece.finish_reason == "stop" else "length"
        if request.has_left:
            return None
        raise Lost("request", request.request_id, "ended without a reason", "see the log of the server")

    async def _effective(self) -> EffectiveWeights:
        version = self._keeper.version
        held = await asyncio.to_thread(self._shadow.effective, version)
        if version < 0:
            return EffectiveWeights(version, held.dtype, "")
        seen = await self._keeper.compare()
        if seen.differing:
            names = ", ".join(seen.differing[:3])
            return EffectiveWeights(version, held.dtype, f"other numbers in {len(seen.differing)} weights ({names})")
        if seen.unknown or not seen.compared:
            log.info("the server cannot look at %d of its weights (%s)", len(seen.unknown), seen.unknown[:1])
            return EffectiveWeights(version, held.dtype, "")
        return held

    def _errand(self, act: Callable[[], Coroutine[Any, Any, R]]) -> Future[R]:
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()
        if not self._loop.call(self._do, act, future):
            future.set_exception(self._why_ended())
        return future

    def _do(self, act: Callable[[], Coroutine[Any, Any, R]], future: Future[R]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
            return
        self._errands.add(future)

        def finish(task: asyncio.Task[R]) -> None:
            error = None if task.cancelled() else task.exception()
            if future not in self._errands:
                return  # it was answered when the engine ended
            self._errands.remove(future)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        asyncio.create_task(act()).add_done_callback(finish)

    def _fail(self, error: EngineError) -> None:
        if self._error is None:
            self._keeper.end()
        super()._fail(error)
        errands = list(self._errands)
        self._errands.clear()
        for errand in errands:
            errand.set_exception(error)

    async def _close(self) -> None:
        await self._keeper.host.close()
        self._shadow.close()
