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
_BLOCK = 256  # tokens whose probabilities are summed in float32; sums of sums are float64
_CANDIDATES = 1024  # most likely tokens among which top-p looks first


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

    Args: logits: [n, vocabulary]; rows: [n] records with temperature, logprob_temperature, top_p, top_k, min_p;
        uniform: [n] in [0, 1).
    Returns: ids [n] int64; logprobs [n] float32 of `log_softmax(logits / logprob_temperature)`, before top-k, min-p and
    top-p; greedy rows (temperature 0) take the most likely token.
    Raises: EngineError: a logit is not finite.
    """
    scores = logits.float()
    greedy = rows["temperature"] == 0
    temperature = np.where(greedy, 1, rows["temperature"])
    if (temperature != 1).any():
        scores = scores / _column(temperature, scores)
    weights, highest = _weights(scores)
    sums = weights.sum(-1).double()  # [n, blocks]
    total = sums.sum(-1)  # before `_truncated` changes them
    if greedy.all():
        tokens = scores.argmax(-1)
    else:
        tokens = _draw(*_truncated(weights, sums, rows), torch.from_numpy(uniform).to(scores.device))
        tokens.clamp_(max=scores.shape[1] - 1)  # only a row of NaN gets beyond
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(scores.device), scores.argmax(-1), tokens)
    told = rows["logprob_temperature"]
    if (told == temperature).all():
        chosen = scores.gather(1, tokens[:, None])[:, 0] - highest[:, 0] - total.log().float()
    else:
        chosen = torch.log_softmax(logits.float() / _column(told, scores), -1).gather(1, tokens[:, None])[:, 0]
    logprobs: np.ndarray = chosen.clamp_(max=0).cpu().numpy()
    if not np.isfinite(logprobs).all():
        raise EngineError("logits", "not finite", "cannot be sampled from", "look at the loss of the version in force")
    return tokens.cpu().numpy(), logprobs


def _weights(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities up to a factor of each row, 1 for its most likely token: [n, blocks, _BLOCK], zeros at the end; and
    the highest scores [n, 1]."""
    count, vocabulary = scores.shape
    highest = scores.amax(-1, keepdim=True)
    blocks = -(-vocabulary // _BLOCK)
    weights = torch.empty(count, blocks * _BLOCK, device=scores.device)
    weights[:, vocabulary:] = 0
    torch.sub(scores, highest, out=weights[:, :vocabulary]).exp_()
    return weights.view(count, blocks, _BLOCK), highest


def _draw(weights: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution: a block by the sums of all, then a token in it. No token is unreachable,
    none of probability 0 is drawn."""
    ends = sums.cumsum(-1)
    points = uniform * ends[:, -1]
    block = torch.searchsorted(ends, points[:, None], right=True).clamp_(max=sums.shape[1] - 1)
    size = sums.gather(1, block)
    share = (points[:, None] - ends.gather(1, block) + size) / size
    inside = weights.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    inner = share.clamp_(0, 1 - 2**-48) * inside[:, -1:]
    return (block * _BLOCK + torch.searchsorted(inside, inner, right=True))[:, 0]


def _truncated(weights: torch.Tensor, sums: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight 0 outside top-k and min-p, then outside the smallest set that holds top_p of what those left. Returns
    `weights` and `sums`, changed where rows ask for it."""
    limits = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
    asked = np.flatnonzero(limits & (rows["temperature"] > 0))
    if asked.size:
        index = torch.from_numpy(asked).to(weights.device)
        flat = weights[index].flatten(1)
        weights[index] = _cut(flat, rows[asked]).view(-1, *weights.shape[1:])
        sums[index] = weights[index].sum(-1).double()
    return weights, sums


def _cut(flat: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """`flat` [n, tokens] with 0 for what is cut. The most likely tokens are ordered; all of them only where top-p, or
    top-k, reaches beyond."""
    top_k, top_p = _column(rows["top_k"], flat, torch.long), _column(rows["top_p"], flat, torch.float64)
    likely = flat >= _column(rows["min_p"], flat)  # the highest weight is 1
    most = flat.shape[1]
    for width in (min(_CANDIDATES, most), most):
        if width < int(top_k.max()) and width < most:
            continue
        kept, order = (flat * likely).topk(width, -1)
        kept = kept * ((top_k == 0) | (torch.arange(width, device=flat.device) < top_k))
        within = kept.double()
        total = torch.where(top_k == 0, (flat * likely).sum(-1, keepdim=True).double(), within.sum(-1, keepdim=True))
        kept = kept * (within.cumsum(-1) - within < top_p * total)
        if width == most or not ((top_k == 0) & (kept[:, -1:] > 0)).any():
            break
    return torch.zeros_like(flat).scatter_(1, order, kept)


def _column(values: np.ndarray, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[n, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device, dtype)[:, None]
