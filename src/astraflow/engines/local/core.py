"""The thread of an embedded engine: it decodes all running requests together and swaps weights between two steps.

    submit, cancel, load_weights ──► inbox ──► engine thread:  cancel ► swap ► admit ► one step of all rows ───────┐
    (any thread)                                    ▲                                                              │
    futures of what ended in this step ◄────────────┴──────────────────────────────────────────────────────────────┘

The inbox is the only shared state. The thread waits only when nothing runs and nothing is due; submit, cancel,
load_weights and close wake it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from astraflow.contracts import TokenSink
from astraflow.engines.local.compute.passes import Passes
from astraflow.engines.local.compute.sampler import row_key
from astraflow.engines.local.decoder import Decoder, Room
from astraflow.engines.local.inbox import Errand, Inbox, Work
from astraflow.engines.local.rows import Request
from astraflow.engines.local.shared import OneOf, Stacks
from astraflow.engines.local.weights import LiveWeights
from astraflow.engines.requests import check_sampling, checked_prompt
from astraflow.errors import AstraFlowError, EngineError, ModelError
from astraflow.models.chat import eos_ids
from astraflow.types import Adapter, EffectiveWeights, Generation, Sampling

T = TypeVar("T")
log = logging.getLogger(__name__)
_SEEDED_STREAM = -1  # apart from the streams of engine seeds, which are >= 0
_COUNTS = {"requests": 0.0, "swaps": 0.0, "swap_s": 0.0}


@dataclass(frozen=True)
class Ways:
    """How requests are served."""

    seed: int  # of requests that bring none
    delay_s: float
    gather_s: float
    keep_caches: bool
    speed: float = 1.0  # share of its time that the thread computes; the rest of it it rests, and counts as busy


class Core:
    """One model and its thread, for one policy, or for several whose adapters rest on it: `policy` counts from 0."""

    def __init__(self, passes: Passes, model_dir: Path, room: Room, ways: Ways) -> None:
        self.decoder = Decoder(passes, eos_ids(model_dir), room, ways.keep_caches)
        self.room, self.inbox = room, Inbox(ways.gather_s)
        self._passes, self._model_dir, self._ways = passes, model_dir, ways
        self._weights: list[LiveWeights | OneOf] = [LiveWeights(passes.model, model_dir)]  # of each policy
        self._vocab_size: int = passes.model.config.get_text_config().vocab_size
        self._serial = itertools.count()
        self._busy_s = 0.0
        self._counts = [dict(_COUNTS)]  # of each policy
        self._thread = threading.Thread(target=self._run, name="astraflow-engine", daemon=True)
        self._thread.start()

    def share(self, policies: int) -> None:
        """Serve so many policies instead of one, each with an adapter on the weights that are there."""
        self.between_steps(lambda: self._share(policies)).result()

    def submit(
        self, policy: int, request_id: str, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling,
        on_tokens: TokenSink | None,
    ) -> Future[Generation]:  # fmt: skip
        """Queue one generation."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()  # so that only `cancel` ends it early, with a result
        try:
            ids = checked_prompt(prompt_ids, self.room.max_context, self._vocab_size)
            check_sampling(sampling)
        except EngineError as error:
            future.set_exception(error)
            return future
        if sampling.seed is None:
            key = row_key(self._ways.seed, next(self._serial))
        else:
            key = row_key(_SEEDED_STREAM, sampling.seed)
        ready_s = time.monotonic() + self._ways.delay_s if self._ways.delay_s else 0.0
        self.inbox.add(Request(request_id, ids, sampling, future, key, ready_s, on_tokens, policy))
        return future

    def load_weights(
        self, policy: int, version: int, tensors: Mapping[str, Any], adapter: Adapter | None
    ) -> Future[int]:
        """Swap between two decode steps; rows of other policies are left alone."""
        return self.between_steps(lambda: self._swap(policy, version, tensors, adapter))

    def effective_weights(self, policy: int) -> Future[EffectiveWeights]:
        """What its rows are computed with; all rows wait while the checksum is computed."""
        return self.between_steps(lambda: self._weights[policy].effective(self.decoder.versions[policy]))

    def stats(self, policy: int) -> dict[str, float]:
        """See `PolicyEngine.stats`."""
        decoder, share = self.decoder, 1.0 / len(self._counts)
        return {
            **self._counts[policy],
            "busy_s": self._busy_s,
            "sampled_tokens": float(decoder.sampled_tokens[policy]),
            "decode_steps": decoder.decode_steps * share,
            "prefill_tokens": decoder.prefill_tokens * share,
            "preempted": decoder.preempted * share,
            "running": decoder.running * share,
            "waiting": (len(self.inbox) + decoder.waiting) * share,
            "kv_usage": decoder.kv_usage,
        }

    def close(self) -> None:
        """Stop; pending futures fail. Closing twice is a no-op."""
        self.inbox.fail(EngineError("engine", "closed", "serves no more requests", "start a new one"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=60)

    def between_steps(self, act: Callable[[], T]) -> Future[T]:
        """What `act` gives in the engine's thread."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.inbox.add_errand(Errand(act, future))
        return future

    def _run(self) -> None:
        decoder, inbox = self.decoder, self.inbox
        try:
            with torch.inference_mode():
                while (work := inbox.take(self.room.max_rows - len(decoder), len(decoder) > 0)) is not None:
                    began = time.perf_counter()
                    self._turn(work)
                    busy_s = (time.perf_counter() - began) / self._ways.speed
                    self._busy_s += busy_s
                    if self._ways.speed < 1.0:
                        inbox.rest(busy_s * (1.0 - self._ways.speed))
        except AstraFlowError as error:
            log.error("the engine stops: %s", error)
            inbox.fail(EngineError("engine", "stopped", f"by an error ({error})", "correct it and start again"))
        except Exception as error:  # whatever it is, nobody may wait for a thread that is gone
            log.exception("the engine's thread ends")
            failure = EngineError(
                "engine", type(error).__name__, f"ended its thread ({error})", "see the cause in its log"
            )
            failure.__cause__ = error
            inbox.fail(failure)

    def _turn(self, work: Work) -> None:
        """Cancel, swap, admit, one step of all rows, answer."""
        decoder, inbox = self.decoder, self.inbox
        finished = [(request, request.ended("cancelled")) for request in work.cancelled_waiting]
        if work.cancelled_running:
            finished += decoder.drop_cancelled()
        for errand in work.errands:
            try:
                inbox.finish_errand(errand, errand.act())
            except ModelError as error:  # nothing was changed; the rows go on under the old weights
                inbox.finish_errand(errand, None, error)
        if work.admitted:
            for request in work.admitted:
                self._counts[request.policy]["requests"] += 1
            decoder.admit(work.admitted)
        decoder.join()
        finished += decoder.step()
        if finished:
            inbox.finish(finished)

    def _swap(self, policy: int, version: int, tensors: Mapping[str, Any], adapter: Adapter | None) -> int:
        began = time.perf_counter()
        self._weights[policy].load(tensors, adapter)
        self.decoder.renew(version, policy)
        self._counts[policy]["swaps"] += 1
        self._counts[policy]["swap_s"] += time.perf_counter() - began
        return version

    def _share(self, policies: int) -> int:
        stacks = Stacks(self._passes.model, self._model_dir, policies)
        self._passes.mix = stacks.mix
        self._weights = [OneOf(stacks, policy) for policy in range(policies)]
        self._counts = [dict(_COUNTS) for _ in range(policies)]
        self.decoder.share(policies)
        return policies
