"""One sampled token per row from its logits, all rows at once.

Randomness is a counter: the uniform number of a row's i-th token depends only on the row's key and i, so a seeded
request gives the same tokens whatever runs beside it.
"""

from __future__ import annotations

import numpy as np
import torch

from astraflow.errors import EngineError

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def row_key(stream: int, number: int) -> int:
    """The 64-bit key of a request: one for each pair of integers."""
    state = 0
    for part in (stream, number):
        state = ((state ^ (part & _MASK)) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def uniforms(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1 - 2**-48]: number `counts[i]` of key `keys[i]`. Source: SplitMix64, Steele et al. 2014."""
    state = keys + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    numbers: np.ndarray = (state >> np.uint64(16)) * 2.0**-48
    return numbers


def sample(logits: torch.Tensor, rows: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and their logprobs.

    Args: logits: [n, vocabulary]; rows: [n] records with temperature, logprob_temperature, top_p, top_k; uniform: [n]
        in [0, 1).
    Returns: ids [n] int64; logprobs [n] float32 of `log_softmax(logits / logprob_temperature)`, before top-k and top-p;
    greedy rows (temperature 0) take the most likely token.
    Raises: EngineError: a logit is not finite.
    """
    scores = logits.float()
    temperature = rows["temperature"]
    greedy = temperature == 0
    if (temperature != 1).any():
        scores = scores / torch.from_numpy(np.where(greedy, 1, temperature).astype(np.float32))[:, None]
    logprobs = torch.log_softmax(scores, -1)
    if greedy.all():
        tokens = logprobs.argmax(-1)
    else:
        tokens = _draw(_filtered(logprobs.exp(), rows), uniform)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy), logprobs.argmax(-1), tokens)
    told = rows["logprob_temperature"]
    if (told != np.where(greedy, 1, temperature)).any():
        logprobs = torch.log_softmax(logits.float() / torch.from_numpy(told.astype(np.float32))[:, None], -1)
    chosen: np.ndarray = logprobs.gather(1, tokens[:, None])[:, 0].numpy()
    if not np.isfinite(chosen).all():
        raise EngineError("logits", "not finite", "cannot be sampled from", "look at the loss of the version in force")
    return tokens.numpy(), chosen


def _draw(probabilities: torch.Tensor, uniform: np.ndarray) -> torch.Tensor:
    """Inverse of the cumulative distribution, in float64: no token is unreachable, none of probability 0 is drawn."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    points = torch.from_numpy(uniform) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, points[:, None], right=True)[:, 0]
    return tokens.clamp_(max=probabilities.shape[1] - 1)  # only a row of NaN gets there


def _filtered(probabilities: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Probability 0 outside top-k, then outside the smallest set that holds top_p of what top-k left."""
    asked = np.flatnonzero((rows["top_k"] > 0) | (rows["top_p"] < 1))
    if not asked.size:
        return probabilities
    index = torch.from_numpy(asked)
    top_k = torch.from_numpy(rows["top_k"][asked])[:, None]
    top_p = torch.from_numpy(rows["top_p"][asked])[:, None]
    ordered, order = probabilities[index].sort(-1, descending=True)
    ranks = torch.arange(ordered.shape[1])
    ordered = ordered * ((top_k == 0) | (ranks < top_k))
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    ordered = ordered * (before < top_p)
    probabilities = probabilities.clone()
    probabilities[index] = torch.zeros_like(ordered).scatter_(1, order, ordered)
    return probabilities
