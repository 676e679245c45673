"""How far the policy has moved from the behaviour that sampled the tokens."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is finite in float32, also when multiplied by any sane advantage


def log_ratios(policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor) -> torch.Tensor:
    """log(pi / mu) per token [N], bounded by `MAX_LOG_RATIO` so that its exponential is finite.

    Beyond the bound the gradient is zero: such a token says nothing about the policy as it is now.
    """
    return (policy_logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum of `values` [N] over the tokens of each sequence [S]. Args: sequences: [N] int64 into [S]."""
    return values.new_zeros(num_sequences).index_add(0, sequences, values)


@torch.no_grad()
def ratio_sums(log_ratio: torch.Tensor, sequences: torch.Tensor, num_sequences: int) -> dict[str, torch.Tensor]:
    """Sums over [N] tokens, to be divided by their number: `approx_kl` and `ratio`; and what `effective_share` needs of
    tokens (`ratio`, `ratio_squares`) and of sequences (`sequence_ratio`, `sequence_ratio_squares`).

    approx_kl is E[(r - 1) - log r], unbiased and never negative (Schulman, "Approximating KL divergence", k3).
    """
    ratio = log_ratio.exp()
    whole = sequence_sums(log_ratio, sequences, num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        # expm1: near 0, where most tokens are, r - 1 loses all its digits. The clamp takes away what rounding leaves.
        "approx_kl": (log_ratio.expm1() - log_ratio).clamp(min=0).sum(),
        "ratio": ratio.sum(),
        "ratio_squares": ratio.square().sum(),
        "sequence_ratio": whole.sum(),
        "sequence_ratio_squares": whole.square().sum(),
    }


def effective_share(total: float, squares: float, count: float) -> float:
    """Effective sample size as a share of the samples, (sum w)^2 / (n sum w^2): 1 where all weigh the same, 1 / n where
    one is all.

    Source: Kong, "A Note on Importance Sampling using Standardized Weights", 1992.
    """
    return total**2 / (count * squares) if squares else 0.0
