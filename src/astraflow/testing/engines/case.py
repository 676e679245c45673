"""What the conformance suites know of an engine, and the rules of every result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from astraflow.contracts import Engine
from astraflow.types import Generation, Sampling

DEADLINE_S = 60.0


def _nothing() -> None:
    pass


@dataclass
class EngineCase:
    """An engine whose replies do not end by themselves within `long_tokens` tokens."""

    engine: Engine
    prompt: list[int]  # not longer than max_context - 2 - long_tokens
    long_tokens: int  # so many that a generation of this length is still running after `advance`
    tensors: Mapping[str, Any]  # weights that `load_weights` accepts
    advance: Callable[[], None]  # returns once every request submitted before has at least two tokens
    finish: Callable[[], None]  # from here on requests may run to their end
    tick: Callable[[], None] | None = None  # of an engine that is held: all may get a token, at any moment
    pause: Callable[[], None] = _nothing  # no request gets a token
    resume: Callable[[], None] = _nothing  # after `pause`
    crash: Callable[[], None] | None = None  # it breaks as it may break by itself
    recovers: bool = False  # after `crash` its requests go on, with the newest version
    score: Callable[[list[int], Generation, float], np.ndarray] | None = None
    """(prompt, generation, temperature) -> logprobs [T] of a plain forward pass over all of it under the weights that
    the engine was started with; None: it has no model."""
    gap: tuple[float, float] = (1e-5, 1e-4)  # p50 and p99 of the distance to `score`, nats
    num_events: int = 1000  # of the test of random events
    num_overload: int = 400  # requests at once, many more than run together


def check_generation(generation: Generation, sampling: Sampling | None = None) -> None:
    """The shape rules of every result; `sampling`: what was asked for."""
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert generation.versions.dtype == np.int32
    assert generation.token_ids.shape == generation.logprobs.shape == generation.versions.shape
    assert generation.token_ids.ndim == 1
    assert np.isfinite(generation.logprobs).all() and (generation.logprobs <= 0).all()
    assert (np.diff(generation.versions) >= 0).all(), "versions only rise within a generation"
    if sampling is not None:
        assert len(generation.token_ids) <= sampling.max_tokens
        if generation.finish_reason == "length":
            assert len(generation.token_ids) == sampling.max_tokens
