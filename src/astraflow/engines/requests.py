"""Checks of a request that every engine makes, and the model's limits they need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from astraflow.errors import EngineError
from astraflow.types import Sampling

_MOST = 2**31 - 1  # that an id or a number of ids can be
GREEDY_BELOW = 1e-5  # a temperature below it is taken as 0: logits divided by less would not be finite


def checked_prompt(prompt_ids: Sequence[int] | np.ndarray, max_context: int, vocab_size: int) -> np.ndarray:
    """[P] int32. Raises: EngineError: empty, longer than `max_context - 1`, or not ids of the model."""
    ids = np.asarray(prompt_ids)
    if ids.ndim != 1 or not ids.size:
        raise EngineError("prompt_ids.shape", ids.shape, "must be one list of at least one id", "send a prompt")
    if ids.dtype.kind not in "iu":
        raise EngineError("prompt_ids", ids.dtype, "must be whole numbers of 64 bits", "send token ids")
    if ids.size > max_context - 1:
        raise EngineError(
            "prompt tokens", ids.size, f"must be below max_context={max_context}",
            "shorten the prompt, or raise engine.max_context if the model allows it",
        )  # fmt: skip
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            "prompt_ids", f"{low}..{high}", f"must be ids of this model, 0..{vocab_size - 1}",
            "encode with the tokenizer of the engine's model directory",
        )  # fmt: skip
    return ids.astype(np.int32, copy=False)


def check_sampling(sampling: Sampling) -> None:
    """Raises: EngineError: a parameter out of its range."""
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    require("sampling.temperature", temperature, 0 <= temperature < math.inf, "must be >= 0", "use 0 for greedy")
    require("sampling.top_p", top_p, 0 < top_p <= 1, "must be in (0, 1]", "use 1 for off")
    require("sampling.top_k", top_k, 0 <= top_k <= _MOST, f"must be in [0, {_MOST}]", "use 0 for off")
    require("sampling.min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "must be in [0, 1]", "use 0 for off")
    told = sampling.logprob_temperature
    require("sampling.logprob_temperature", told, told is None or 0 < told < math.inf, "must be > 0", "leave it out")
    require("sampling.max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "must be >= 1", "ask for a token")
    stops = sampling.stop_token_ids
    stoppable = all(0 <= each <= _MOST for each in stops)
    require("sampling.stop_token_ids", stops, stoppable, f"must be in [0, {_MOST}]", "use ids of the model")


def require(thing: str, value: object, holds: bool, rule: str, fix: str) -> None:
    """Raises: EngineError: `holds` is false."""
    if not holds:
        raise EngineError(thing, value, rule, fix)
