"""The embedded engine of one policy: its settings, and what it shows of the thread that does the work (`core`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig

from astraflow.contracts import Engine, TokenSink
from astraflow.engines.local.compute.guard import prepared
from astraflow.engines.local.core import Core, Ways
from astraflow.engines.local.decoder import Room
from astraflow.engines.requests import require
from astraflow.errors import EngineError, ModelError
from astraflow.models.load import load_model
from astraflow.types import Adapter, EffectiveWeights, Generation, Sampling

log = logging.getLogger(__name__)


class PolicyEngine:
    """One policy of a `Core`."""

    def __init__(self, core: Core, policy: int) -> None:
        self._core, self._policy = core, policy

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """Queue one generation."""
        return self._core.submit(self._policy, request_id, prompt_ids, sampling, on_tokens)

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; nothing happens when it is not known (any more)."""
        self._core.inbox.cancel(self._policy, request_id)

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Swap between two decode steps. Tensors that do not fit change nothing and fail the future with ModelError.

        Running rows keep their tokens. Their keys and values are computed afresh (`kv_after_swap` "recompute"), so that
        every later token has the logprob of a fresh pass under its own version; or kept ("keep"), which costs nothing,
        and later tokens then attend to what earlier versions left. What was shelved is dropped in both cases.
        """
        return self._core.load_weights(self._policy, version, tensors, adapter)

    def effective_weights(self) -> Future[EffectiveWeights]:
        """The checksum of what rows of the policy are computed with, tied weights once; the rows wait meanwhile."""
        return self._core.effective_weights(self._policy)

    @property
    def version(self) -> int:
        """The version in force."""
        return self._core.decoder.versions[self._policy]

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation, in tokens."""
        return self._core.room.max_context

    @property
    def ended(self) -> Future[EngineError]:
        """Why it serves no more, once that is so."""
        return self._core.inbox.ended

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the contract; swap_s: seconds of swaps, caches of running rows included; preempted:
        times that a row had to wait again for memory. What policies that share a base have together (steps, prompts,
        rows) is divided evenly, so that sums over engines hold; busy_s and kv_usage are the same for each."""
        return self._core.stats(self._policy)

    def close(self) -> None:
        """Stop; pending futures fail, also those of policies that share the base. Closing twice is a no-op."""
        self._core.close()


class LocalEngine(PolicyEngine):
    """Continuous batching of one Hugging Face model on this machine's CPU or on one GPU.

    Args: model_dir: a Hugging Face directory; max_concurrency: rows decoded at once, more requests wait; max_context: 0
    is the model's own limit, or less where kv_cache_mb holds no more; threads: intra-op threads, of the whole process;
    seed: of requests that bring none; delay_s: every request waits this long before it starts; prefix_cache_mb: memory
    for keys and values of prompts and finished turns that may come back, 0 keeps none; kv_cache_mb: memory for those of
    running rows, more requests wait; prefill_chunk: tokens of prompts read in a step in which rows decode;
    kv_after_swap: what becomes of the keys and values of running rows when the weights change, see `load_weights`;
    gather_ms: while requests come in one after the other (less than a millisecond apart), the next decode step waits
    for them at most this long; device: auto is a GPU where there is one; speed: share of its time that it computes,
    0.3 is an engine of a third of the speed.
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
        speed: float = 1.0,
    ) -> None:
        require("engine.max_concurrency", max_concurrency, max_concurrency >= 1, "must be >= 1", "use 64")
        require("engine.max_context", max_context, max_context == 0 or max_context >= 2, "must be >= 2", "use 0")
        require("engine.threads", threads, threads >= 1, "must be >= 1", "use 1")
        require("engine.delay_s", delay_s, 0 <= delay_s < math.inf, "must be >= 0", "use 0 for none")
        require("engine.prefix_cache_mb", prefix_cache_mb, prefix_cache_mb >= 0, "must be >= 0", "use 0 for none")
        require("engine.kv_cache_mb", kv_cache_mb, kv_cache_mb >= 1, "must be >= 1", "use 4096")
        require("engine.prefill_chunk", prefill_chunk, prefill_chunk >= 1, "must be >= 1", "use 512")
        require("engine.gather_ms", gather_ms, 0 <= gather_ms < math.inf, "must be >= 0", "use 0 for none")
        require("engine.speed", speed, 0 < speed <= 1, "must be above 0, and at most 1", "use 1")
        known = kv_after_swap in ("recompute", "keep")
        require("engine.kv_after_swap", kv_after_swap, known, "must be recompute or keep", "use recompute")
        torch.set_num_threads(threads)
        model = load_model(model_dir, dtype, "sdpa").requires_grad_(False)
        passes, size = prepared(model.to(_device(device)))  # type: ignore[arg-type]
        context = _context(model.config, max_context, kv_cache_mb, size)
        room = Room(max_concurrency, context, prefill_chunk, kv_cache_mb << 20, prefix_cache_mb << 20, size)
        ways = Ways(seed, delay_s, gather_ms / 1000.0, kv_after_swap == "keep", speed)
        super().__init__(Core(passes, Path(model_dir), room, ways), 0)

    def adapters(self, policies: int) -> list[Engine]:
        """See `contracts.SharesBase`."""
        self._core.share(policies)
        return [PolicyEngine(self._core, policy) for policy in range(policies)]


def _device(asked: str) -> torch.device:
    available = torch.cuda.is_available()
    require("engine.device", asked, asked in ("auto", "cpu", "cuda"), "must be auto, cpu or cuda", "use auto")
    require("engine.device", asked, asked != "cuda" or available, "has no GPU here", "use cpu, or auto")
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def _context(config: PreTrainedConfig, asked: int, kv_cache_mb: int, position_bytes: int) -> int:
    """The longest prompt and reply. Raises: ModelError: the model has no such context. EngineError: the memory for keys
    and values, of which one token needs `position_bytes`, does not hold it."""
    limit: int = config.get_text_config().max_position_embeddings
    if asked > limit:
        raise ModelError(
            "engine.max_context", asked, f"must be at most {limit}, the model's limit", "use 0 for the model's limit"
        )
    most = (kv_cache_mb << 20) // position_bytes
    needed = (max(asked, 2) * position_bytes >> 20) + 1
    require(
        "engine.kv_cache_mb", kv_cache_mb, most >= max(asked, 2),
        f"must be at least {needed} to hold {max(asked, 2)} tokens", "raise it, or lower engine.max_context",
    )  # fmt: skip
    if not asked and most < limit:
        log.warning("engine.kv_cache_mb=%d holds %d tokens: longer prompts are refused", kv_cache_mb, most)
    return asked or min(limit, most)
