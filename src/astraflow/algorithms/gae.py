"""Advantages from a critic, and how the critic learns."""

from __future__ import annotations

import numpy as np
import torch


def gae(rewards: np.ndarray, values: np.ndarray, last: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Generalized advantage estimation: A_t = sum over k >= 0 of (gamma lam)^k d_(t + k) up to the end of the chain,
    with d_t = r_t + gamma V_(t+1) - V_t. [M] -> [M] float64

    V_t is what the critic expects before token t is chosen; behind the last token of a chain it is 0. lam = 1 is the
    return minus V_t (no bias), lam = 0 is d_t (least variance). A + V is what the critic should have said.

    Args: rewards, values: [M] of tokens in the order in which they were sampled, chain after chain. last: [M] bool, the
    last token of its chain; the last of all is one.
    Source: Schulman et al. 2015, arXiv:1506.02438 equations 11 to 16.
    """
    if not len(rewards):
        return np.zeros(0)
    after = np.append(values[1:], 0.0).astype(np.float64)
    result: np.ndarray = rewards + gamma * np.where(last, 0.0, after) - values.astype(np.float64)
    # Sums of 1, 2, 4, ... terms: A_t = A_t + c^n A_(t + n), as long as t + n is in the same chain.
    ends = np.flatnonzero(last)
    left = np.repeat(ends, np.diff(np.append(-1, ends))) - np.arange(len(rewards))  # tokens that follow in the chain
    step, decay = 1, gamma * lam
    while step <= left.max() and decay > 0:
        inside = np.flatnonzero(left >= step)
        result[inside] = result[inside] + decay * result[inside + step]
        step, decay = 2 * step, decay * decay
    return result


def value_losses(
    values: torch.Tensor, before: torch.Tensor, targets: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error of a critic per token [N], halved, and where the clip took its gradient away [N] bool.

    With a clip c > 0: max((V - G)^2, (B + min(max(V - B, -c), c) - G)^2) / 2, where B (`before`) is what the critic
    said before the first update on the batch: an update gains nothing by moving a value more than c. 0: no clip.
    Args: targets: G.
    Source: the PPO of OpenAI's baselines, as described in Engstrom et al. 2020, arXiv:2005.12729 section 3.
    """
    plain = (values - targets).square()
    if not clip:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    bounded = (before + (values - before).clamp(-clip, clip) - targets).square()
    return torch.maximum(plain, bounded) / 2, bounded > plain
