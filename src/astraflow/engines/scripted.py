"""An engine without a model: it says what a script says. For tests of everything around an engine; torch-free.

Released (the default), a request ends before `submit` returns. Held, requests run until `step` gives each of them some
tokens or `release` lets all of them end, so a test decides what happens in the middle of a generation, without sleeps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.config.rooms import resolve
from astraflow.contracts import TokenSink
from astraflow.engines.requests import check_sampling, checked_prompt
from astraflow.errors import EngineError
from astraflow.types import Adapter, EffectiveWeights, FinishReason, Generation, Sampling

_MAX_CONTEXT = 4096
_MAX_ID = 2**31 - 1


class Reply(msgspec.Struct, frozen=True):
    """What one request samples, its EOS included if it has one."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None  # None: the engine's `logprob` for each token


Script = Callable[[np.ndarray, int], Sequence[int] | Reply]
"""(prompt ids, number of the request from 0) -> what it samples."""


@dataclass(slots=True, eq=False)
class _Running:
    request_id: str
    prompt_size: int
    sampling: Sampling
    reply: Reply
    future: Future[Generation]
    on_tokens: TokenSink | None
    versions: list[int] = field(default_factory=list)
    ended: FinishReason | None = None


class ScriptedEngine:
    """Passes the conformance suite of the Engine contract.

    Args: script: a function; or its path 'module:function'; or the replies of requests 0, 1, ..., used in turn; or one
    reply for all; logprob: of every token that a reply gives none for; held: start held; delay_s: requests end this
    much later (released only). The other arguments are those of LocalEngine, taken so that a run file may say
    `engine = { type = "scripted", script = "..." }`; they change nothing here.
    Raises: Problem: the script cannot be imported. EngineError: there is no reply in it.
    """

    def __init__(
        self,
        script: Script | str | Sequence[int] | Sequence[Sequence[int]],
        *,
        logprob: float = -7.25,
        held: bool = False,
        model_dir: Path | str | None = None,
        dtype: str = "float32",
        max_concurrency: int = 64,
        max_context: int = 0,
        threads: int = 1,
        seed: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        self.seen: deque[tuple[str, np.ndarray, Sampling]] = deque(maxlen=1000)  # the newest requests, for tests
        self._script = _as_script(script)
        self._logprob, self._held, self._delay_s = logprob, held, delay_s
        self._max_context = max_context or _MAX_CONTEXT
        self._version = -1
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._counts = {"busy_s": 0.0, "sampled_tokens": 0.0, "prefill_tokens": 0.0, "requests": 0.0, "swaps": 0.0}
        self._error: EngineError | None = None
        self.ended: Future[EngineError] = Future()
        self.ended.set_running_or_notify_cancel()

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """Queue one generation; when released and without delay, its future is done on return."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        try:
            ids = checked_prompt(prompt_ids, self._max_context, _MAX_ID)
            check_sampling(sampling)
            self._add(request_id, ids, sampling, future, on_tokens)
        except EngineError as error:
            future.set_exception(error)
            return future
        if not self._held:
            self._finish_later(request_id) if self._delay_s else self.step(self._max_context, request_id)
        return future

    def cancel(self, request_id: str) -> None:
        """End a request with what it has."""
        with self._lock:
            running = self._running.pop(request_id, None)
        if running is not None:
            running.ended = "cancelled"
            self._answer([running])

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """In force at once: the next token of every request is labelled with it."""
        future: Future[int] = Future()
        with self._lock:
            error = self._error
            if error is None:
                self._version = version
                self._counts["swaps"] += 1
        if error is None:
            future.set_result(version)
        else:
            future.set_exception(error)
        return future

    def effective_weights(self) -> Future[EffectiveWeights]:
        """It has none."""
        future: Future[EffectiveWeights] = Future()
        if self._error is None:
            future.set_result(EffectiveWeights(self._version, "float32", ""))
        else:
            future.set_exception(self._error)
        return future

    @property
    def version(self) -> int:
        """The version in force."""
        return self._version

    @property
    def max_context(self) -> int:
        """Longest prompt plus reply."""
        return self._max_context

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the contract; busy_s stays 0."""
        with self._lock:
            return {**self._counts, "running": float(len(self._running)), "waiting": 0.0}

    def close(self) -> None:
        """Stop; pending futures fail."""
        self.fail(EngineError("engine", "closed", "serves no more requests", "start a new one"))

    def fail(self, error: EngineError) -> None:
        """End as an engine does that breaks; only the first call counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            pending = list(self._running.values())
            self._running.clear()
        self.ended.set_result(error)
        for running in pending:
            running.future.set_exception(error)

    def hold(self) -> None:
        """From now on requests wait for `step` or `release`."""
        self._held = True

    def release(self) -> None:
        """Let every request end, also those to come."""
        self._held = False
        self.step(self._max_context)

    def step(self, tokens: int = 1, request_id: str | None = None) -> None:
        """Give every held request (or one of them) up to `tokens` tokens under the version in force."""
        with self._lock:
            chosen = [r for r in self._running.values() if request_id in (None, r.request_id)]
            for running in chosen:
                self._advance(running, tokens)
            ended = [r for r in chosen if r.ended]
            for running in ended:
                del self._running[running.request_id]
        self._answer(ended)

    def _add(
        self,
        request_id: str,
        ids: np.ndarray,
        sampling: Sampling,
        future: Future[Generation],
        on_tokens: TokenSink | None,
    ) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if request_id in self._running:
                raise EngineError("request_id", request_id, "is in use", "give every request its own id")
            number = int(self._counts["requests"])
            self._counts["requests"] += 1
            self._counts["prefill_tokens"] += ids.size
            said = self._script(ids, number)
            reply = said if isinstance(said, Reply) else Reply(said)
            if not len(reply.token_ids):
                raise EngineError("script", "[]", f"gave request {number} no token", "end a reply at least with EOS")
            self.seen.append((request_id, ids, sampling))
            self._running[request_id] = _Running(request_id, ids.size, sampling, reply, future, on_tokens)

    def _advance(self, running: _Running, tokens: int) -> None:
        reply, sampling = running.reply, running.sampling
        room = min(sampling.max_tokens, self._max_context - running.prompt_size)
        first = len(running.versions)
        for token in reply.token_ids[first:][:tokens]:
            running.versions.append(self._version)
            self._counts["sampled_tokens"] += 1
            count = len(running.versions)
            if token in sampling.stop_token_ids or count == len(reply.token_ids):
                running.ended = "stop"
            elif count == room:
                running.ended = "length"
            if running.ended:
                break
        if running.on_tokens is not None and len(running.versions) > first:
            span = slice(first, len(running.versions))
            running.on_tokens(reply.token_ids[span], self._logprobs(running)[span], running.versions[span])

    def _logprobs(self, running: _Running) -> Sequence[float]:
        return running.reply.logprobs or [self._logprob] * len(running.versions)

    def _answer(self, ended: Sequence[_Running]) -> None:
        for running in ended:
            count = len(running.versions)
            running.future.set_result(
                Generation(
                    np.array(running.reply.token_ids[:count], np.int32),
                    np.array(self._logprobs(running)[:count], np.float32),
                    np.array(running.versions, np.int32),
                    running.ended or "error",
                )
            )

    def _finish_later(self, request_id: str) -> None:
        timer = threading.Timer(self._delay_s, self.step, (self._max_context, request_id))
        timer.daemon = True
        timer.start()


def _as_script(script: Script | str | Sequence[int] | Sequence[Sequence[int]]) -> Script:
    if isinstance(script, str):
        found: Script = resolve("engines", script, "engine.script")
        return found
    if callable(script):
        return script
    if not len(script):
        raise EngineError("engine.script", "[]", "holds no reply", "give a list of ids, or of such lists")
    replies = [list(reply) for reply in script if not isinstance(reply, int)] or [
        [i for i in script if isinstance(i, int)]
    ]
    return lambda _ids, number: replies[number % len(replies)]
