"""An engine and a loss that take as long as those of the modelled machine, and a workflow with slow tools."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from astraflow.algorithms.losses.cispo import Cispo
from astraflow.algorithms.losses.contract import Metrics, Prepared, TrainedTokens
from astraflow.contracts import LLM, TokenSink
from astraflow.engines.local import LocalEngine
from astraflow.errors import EngineError
from astraflow.types import Adapter, EffectiveWeights, Generation, Message, Outcome, Sampling, Task
from astraflow.workflows.teams.actor_verifier import ActorVerifier
from benchmarks.multi_policy.hardware import CALL_TOKENS, SCALE, TOOL_S, TRAIN_GPU_S_PER_TOKEN, Rows

T = TypeVar("T")
GATHER_S = 0.025  # real seconds in which requests to the tiny model come together, so that it costs few decode steps


@dataclass(eq=False)
class _Call:
    request_id: str
    prompt_ids: Sequence[int] | np.ndarray
    sampling: Sampling
    on_tokens: TokenSink | None
    sampled: Future[Generation] = field(default_factory=Future)  # by the tiny model
    future: Future[Generation] = field(default_factory=Future)


class ModelledEngine:
    """The embedded engine with a tiny model; what it samples is told when the modelled GPUs would have it.

    A request is sampled at its beginning, so its tokens have the version that was in force then: the oldest of those
    that a long answer would have. Args: gpus: that the rows share; scale: modelled seconds in a real one.
    """

    def __init__(
        self, model_dir: Path | str, *, gpus: float = 1.0, scale: float = SCALE, max_concurrency: int = 64,
        threads: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        self._tiny = LocalEngine(model_dir, max_concurrency=max_concurrency, threads=threads, seed=seed)
        self._scale, self._rng = scale, random.Random(seed)
        self._rows, self._start = Rows(gpus), time.monotonic()
        self._calls: dict[int, _Call] = {}
        self._fresh: list[_Call] = []  # not asked of the tiny model yet
        self._gathered = 0.0  # since when
        self._keys: dict[str, int] = {}
        self._serial = itertools.count()
        self._swaps: list[tuple[float, Future[int], Future[int]]] = []  # (in force at, told, of the tiny model)
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="modelled-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request_id: str, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:  # fmt: skip
        """Queue one generation."""
        call = _Call(request_id, prompt_ids, sampling, on_tokens)
        call.future.set_running_or_notify_cancel()
        key = next(self._serial)
        with self._changed:
            self._calls[key], self._keys[request_id] = call, key
            self._gathered = self._gathered or time.monotonic()
            self._fresh.append(call)
            ended = self._rows.add(key, CALL_TOKENS.draw(self._rng), self._now())
            self._changed.notify()
        self._tell(ended)
        return call.future

    def cancel(self, request_id: str) -> None:
        """End a request with what it has."""
        self._ask(self._take_fresh())
        self._tiny.cancel(request_id)
        with self._changed:
            key = self._keys.get(request_id)
        if key is not None:
            self._tell([key])

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Requests that come from now on are sampled under it; all rows pause as on the modelled GPUs."""
        told: Future[int] = Future()
        told.set_running_or_notify_cancel()
        self._ask(self._take_fresh())  # they began before
        of_tiny = self._tiny.load_weights(version, tensors, adapter)
        with self._changed:
            until, ended = self._rows.pause(self._now())
            self._swaps.append((until, told, of_tiny))
            self._changed.notify()
        self._tell(ended)
        return told

    def effective_weights(self) -> Future[EffectiveWeights]:
        """Of the tiny model."""
        return self._tiny.effective_weights()

    @property
    def version(self) -> int:
        """The version in force."""
        return self._tiny.version

    @property
    def max_context(self) -> int:
        """Of the tiny model."""
        return self._tiny.max_context

    @property
    def ended(self) -> Future[EngineError]:
        """Why it serves no more."""
        return self._tiny.ended

    def stats(self) -> dict[str, float]:
        """Those of the tiny model; of the modelled GPUs: busy_s, real seconds in which a row ran; row_s: the same times
        the rows; running, waiting."""
        with self._changed:
            rows = self._rows
            own = {
                "busy_s": rows.busy_s / self._scale, "row_s": rows.row_s / self._scale,
                "running": float(rows.running), "waiting": float(rows.waiting),
            }  # fmt: skip
        return {**self._tiny.stats(), "tiny_busy_s": self._tiny.stats()["busy_s"], **own}

    def close(self) -> None:
        """Stop; pending futures fail."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=60)
        self._ask(self._take_fresh())
        self._tiny.close()
        self._tell(list(self._calls))

    def _now(self) -> float:
        return (time.monotonic() - self._start) * self._scale

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                now = self._now()
                ended = self._rows.advance(now)
                over = [swap for swap in self._swaps if swap[0] <= now]
                self._swaps = [swap for swap in self._swaps if swap[0] > now]
                fresh = self._take_fresh() if self._fresh and self._gathered + GATHER_S <= time.monotonic() else []
                if not (ended or over or fresh):
                    self._changed.wait(self._until_next(now))
            self._ask(fresh)
            self._tell(ended)
            for _, told, of_tiny in over:
                of_tiny.add_done_callback(lambda done, told=told: _pass_on(done, told))  # type: ignore[misc]

    def _until_next(self, now: float) -> float | None:
        ends = [(end - now) / self._scale for end in (self._rows.next_end(), *(s[0] for s in self._swaps)) if end]
        if self._fresh:
            ends.append(self._gathered + GATHER_S - time.monotonic())
        return max(0.0005, min(ends)) if ends else None

    def _take_fresh(self) -> list[_Call]:
        with self._changed:
            fresh, self._fresh, self._gathered = self._fresh, [], 0.0
        return fresh

    def _ask(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            sampled = self._tiny.submit(call.request_id, call.prompt_ids, call.sampling)
            sampled.add_done_callback(lambda done, call=call: _pass_on(done, call.sampled))  # type: ignore[misc]

    def _tell(self, keys: Sequence[int]) -> None:
        for key in keys:
            with self._changed:
                call = self._calls.pop(key, None)
                if call is not None:
                    self._keys.pop(call.request_id, None)
            if call is not None:
                call.sampled.add_done_callback(lambda done, call=call: self._answer(call, done))  # type: ignore[misc]

    def _answer(self, call: _Call, done: Future[Generation]) -> None:
        if (error := done.exception()) is not None:
            call.future.set_exception(error)
            return
        found = done.result()
        if call.on_tokens is not None and len(found.token_ids):
            call.on_tokens(found.token_ids.tolist(), found.logprobs.tolist(), found.versions.tolist())
        call.future.set_result(found)


def _pass_on(done: Future[T], told: Future[T]) -> None:
    error = done.exception()
    if error is None:
        told.set_result(done.result())
    else:
        told.set_exception(error)


class ModelledLoss(Cispo):
    """A policy gradient with importance weights of at most 2; each microbatch takes as long as on `gpus` modelled GPUs.

    On data of the present policy, which is all that the loop has, the weights are 1 and any clipped loss has the same
    gradient. What the tiny model's own forward and backward pass takes comes on top.
    """

    def __init__(self, gpus: float = 1.0, scale: float = SCALE) -> None:
        super().__init__(clip_high=1.0)
        self._real_s_per_token = TRAIN_GPU_S_PER_TOKEN / gpus / scale if scale else 0.0

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        time.sleep(len(tokens.policy_logprobs) * self._real_s_per_token)
        return super().__call__(tokens, prepared)


class SlowlyVerified(ActorVerifier):
    """Actor and verifier; a tool runs before each verdict. `scale`: modelled seconds in a real one."""

    def __init__(self, *, reward: str | Mapping[str, Any], check: str, retry: str, scale: float = SCALE) -> None:
        super().__init__(reward=reward, check=check, retry=retry)
        self._rng, self._scale = random.Random(), scale

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        return await super().__call__(task, {**llm, "verifier": _AfterTool(llm["verifier"], self._rng, self._scale)})


class _AfterTool:
    def __init__(self, llm: LLM, rng: random.Random, scale: float) -> None:
        self._llm, self._rng, self._scale = llm, rng, scale
        self.base_url, self.api_key = llm.base_url, llm.api_key

    async def chat(self, messages: Sequence[Message], **options: Any) -> Any:
        """The verdict, after the tool."""
        await asyncio.sleep(TOOL_S.draw(self._rng) / self._scale)
        return await self._llm.chat(messages, **options)
