"""The embedded engine: one thread that decodes all running requests together and swaps weights between two steps.

    submit, cancel, load_weights ──► inbox ──► engine thread:  cancel ► swap ► admit + prefill ► one decode step ─┐
    (any thread)                                    ▲                                                              │
    futures of what ended in this step ◄────────────┴──────────────────────────────────────────────────────────────┘

The inbox is the only shared state. The thread waits only when nothing runs and nothing is due; submit, cancel,
load_weights and close wake it.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from astraflow.contracts import TokenSink
from astraflow.engines.local.compute.guard import position_bytes
from astraflow.engines.local.compute.passes import Passes
from astraflow.engines.local.compute.sampler import row_key
from astraflow.engines.local.decoder import Decoder, Room
from astraflow.engines.local.inbox import Errand, Inbox, Work
from astraflow.engines.local.rows import Request
from astraflow.engines.local.weights import LiveWeights
from astraflow.engines.requests import check_sampling, checked_prompt, require
from astraflow.errors import AstraFlowError, EngineError, ModelError
from astraflow.models.chat import eos_ids
from astraflow.models.load import load_model
from astraflow.types import Adapter, EffectiveWeights, Generation, Sampling

T = TypeVar("T")
log = logging.getLogger(__name__)
_SEEDED_STREAM = -1  # apart from the streams of engine seeds, which are >= 0


class LocalEngine:
    """Continuous batching of one Hugging Face model on this machine's CPU or on one GPU.

    Args: model_dir: a Hugging Face directory; max_concurrency: rows decoded at once, more requests wait; max_context: 0
    is the model's own limit, or less where kv_cache_mb holds no more; threads: intra-op threads, of the whole process;
    seed: of requests that bring none; delay_s: every request waits this long before it starts; prefix_cache_mb: memory
    for keys and values of prompts and finished turns that may come back, 0 keeps none; kv_cache_mb: memory for those of
    running rows, more requests wait; prefill_chunk: tokens of prompts read between two decode steps of running rows;
    kv_after_swap: what becomes of the keys and values of running rows when the weights change, see `load_weights`;
    gather_ms: while requests come in one after the other (less than a millisecond apart), the next decode step waits
    for them at most this long; device: auto is a GPU where there is one.
    Raises: ModelError: the directory holds no model that this engine can run. EngineError: a setting out of its range.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        dtype: str = "float32",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        max_concurrency: int = 64,
        max_context: int = 0,
        threads: int = 1,
        seed: int = 0,
        delay_s: float = 0.0,
        prefix_cache_mb: int = 256,
        kv_cache_mb: int = 4096,
        prefill_chunk: int = 512,
        gather_ms: float = 20.0,
        kv_after_swap: Literal["recompute", "keep"] = "recompute",
    ) -> None:
        require("engine.max_concurrency", max_concurrency, max_concurrency >= 1, "must be >= 1", "use 64")
        require("engine.max_context", max_context, max_context == 0 or max_context >= 2, "must be >= 2", "use 0")
        require("engine.threads", threads, threads >= 1, "must be >= 1", "use 1")
        require("engine.delay_s", delay_s, 0 <= delay_s < math.inf, "must be >= 0", "use 0 for none")
        require("engine.prefix_cache_mb", prefix_cache_mb, prefix_cache_mb >= 0, "must be >= 0", "use 0 for none")
        require("engine.kv_cache_mb", kv_cache_mb, kv_cache_mb >= 1, "must be >= 1", "use 4096")
        require("engine.prefill_chunk", prefill_chunk, prefill_chunk >= 1, "must be >= 1", "use 512")
        require("engine.gather_ms", gather_ms, 0 <= gather_ms < math.inf, "must be >= 0", "use 0 for none")
        known = kv_after_swap in ("recompute", "keep")
        require("engine.kv_after_swap", kv_after_swap, known, "must be recompute or keep", "use recompute")
        torch.set_num_threads(threads)
        passes = Passes(load_model(model_dir, dtype, "sdpa").requires_grad_(False).to(_device(device)))  # type: ignore[arg-type]
        room = _room(passes, max_concurrency, max_context, prefill_chunk, kv_cache_mb << 20, prefix_cache_mb << 20)
        self._weights = LiveWeights(passes.model, Path(model_dir))
        self._max_context = room.max_context
        self._vocab_size: int = passes.model.config.get_text_config().vocab_size
        self._decoder = Decoder(passes, eos_ids(Path(model_dir)), room, kv_after_swap == "keep")
        self._max_concurrency, self._seed, self._delay_s = max_concurrency, seed, delay_s
        self._serial = itertools.count()
        self._counts = {"busy_s": 0.0, "requests": 0.0, "swaps": 0.0, "swap_s": 0.0}
        self._inbox = Inbox(gather_ms / 1000.0)
        self._thread = threading.Thread(target=self._run, name="astraflow-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """Queue one generation."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()  # so that only `cancel` ends it early, with a result
        try:
            ids = checked_prompt(prompt_ids, self._max_context, self._vocab_size)
            check_sampling(sampling)
        except EngineError as error:
            future.set_exception(error)
            return future
        if sampling.seed is None:
            key = row_key(self._seed, next(self._serial))
        else:
            key = row_key(_SEEDED_STREAM, sampling.seed)
        ready_s = time.monotonic() + self._delay_s if self._delay_s else 0.0
        self._inbox.add(Request(request_id, ids, sampling, future, key, ready_s, on_tokens))
        return future

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; nothing happens when it is not known (any more)."""
        self._inbox.cancel(request_id)

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Swap between two decode steps. Tensors that do not fit change nothing and fail the future with ModelError.

        Running rows keep their tokens. Their keys and values are computed afresh (`kv_after_swap` "recompute"), so that
        every later token has the logprob of a fresh pass under its own version; or kept ("keep"), which costs nothing,
        and later tokens then attend to what earlier versions left. What was shelved is dropped in both cases.
        """
        return self._between_steps(lambda: self._swap(version, tensors, adapter))

    def effective_weights(self) -> Future[EffectiveWeights]:
        """The checksum of the live model's weights, tied ones once; the rows wait while it is computed."""
        return self._between_steps(lambda: self._weights.effective(self.version))

    @property
    def version(self) -> int:
        """The version in force."""
        return self._decoder.version

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""
        return self._max_context

    @property
    def ended(self) -> Future[EngineError]:
        """Why it serves no more, once that is so."""
        return self._inbox.ended

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the contract; swap_s: seconds of swaps, caches of running rows included; preempted:
        times that a row had to wait again for memory."""
        decoder = self._decoder
        return {
            **self._counts,
            "sampled_tokens": float(decoder.sampled_tokens),
            "decode_steps": float(decoder.decode_steps),
            "prefill_tokens": float(decoder.prefill_tokens),
            "preempted": float(decoder.preempted),
            "running": float(decoder.running),
            "waiting": float(len(self._inbox) + decoder.waiting),
            "kv_usage": decoder.kv_usage,
        }

    def close(self) -> None:
        """Stop; pending futures fail. Closing twice is a no-op."""
        self._inbox.fail(EngineError("engine", "closed", "serves no more requests", "start a new one"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=60)

    def _run(self) -> None:
        decoder, inbox = self._decoder, self._inbox
        try:
            with torch.inference_mode():
                while (work := inbox.take(self._max_concurrency - len(decoder), len(decoder) > 0)) is not None:
                    began = time.perf_counter()
                    self._turn(work)
                    self._counts["busy_s"] += time.perf_counter() - began
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
        """Cancel, swap, admit, read what joins, one token for all running rows, answer."""
        decoder, inbox = self._decoder, self._inbox
        finished = [(request, request.ended("cancelled")) for request in work.cancelled_waiting]
        if work.cancelled_running:
            finished += decoder.drop_cancelled()
        for errand in work.errands:
            try:
                inbox.finish_errand(errand, errand.act())
            except ModelError as error:  # nothing was changed; the rows go on under the old weights
                inbox.finish_errand(errand, None, error)
        if work.admitted:
            self._counts["requests"] += len(work.admitted)
            decoder.admit(work.admitted)
        decoder.join()
        finished += decoder.step()
        if finished:
            inbox.finish(finished)

    def _between_steps(self, act: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._inbox.add_errand(Errand(act, future))
        return future

    def _swap(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None) -> int:
        began = time.perf_counter()
        self._weights.load(tensors, adapter)
        self._decoder.renew(version)
        self._counts["swaps"] += 1
        self._counts["swap_s"] += time.perf_counter() - began
        return version


def _device(asked: str) -> torch.device:
    available = torch.cuda.is_available()
    require("engine.device", asked, asked in ("auto", "cpu", "cuda"), "must be auto, cpu or cuda", "use auto")
    require("engine.device", asked, asked != "cuda" or available, "has no GPU here", "use cpu, or auto")
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def _room(passes: Passes, rows: int, context: int, chunk: int, kv_bytes: int, shelf_bytes: int) -> Room:
    """Raises: ModelError: the model cannot be decoded here, or has no such context. EngineError: the memory for keys
    and values does not hold that context."""
    limit: int = passes.model.config.get_text_config().max_position_embeddings
    if context > limit:
        raise ModelError(
            "engine.max_context", context, f"must be at most {limit}, the model's limit", "use 0 for the model's limit"
        )
    size = position_bytes(passes)
    most = kv_bytes // (2 * size)  # one row that runs, and a prompt as long that is read meanwhile
    require(
        "engine.kv_cache_mb", kv_bytes >> 20, most >= max(context, 2),
        f"must be at least {(2 * max(context, 2) * size >> 20) + 1}: twice what {max(context, 2)} tokens need",
        "raise it, or lower engine.max_context",
    )  # fmt: skip
    if not context and most < limit:
        log.warning("engine.kv_cache_mb=%d holds %d tokens twice: longer ones are refused", kv_bytes >> 20, most)
    return Room(rows, context or min(limit, most), chunk, kv_bytes, shelf_bytes, size)
