"""How far the policy has moved from the behaviour that sampled the tokens."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is finite in float32, also when multiplied by any sane advantage


def log_ratios(policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor) -> torch.Tensor:
    """log(pi / mu) per token [N], bounded by `MAX_LOG_RATIO` so that its exponential is finite.

    Beyond the bound the gradient is zero: such a token says nothing about the policy as it is now.
    """
    return (policy_logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def ratio_sums(log_ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over [N] tokens, to be divided by the number of tokens: `approx_kl` and `ratio`.

    approx_kl is E[(r - 1) - log r], unbiased and never negative (Schulman, "Approximating KL divergence", k3).
    """
    # expm1: near 0, where most tokens are, r - 1 loses all its digits. The clamp takes away what rounding leaves.
    return {"approx_kl": (log_ratio.expm1() - log_ratio).clamp(min=0).sum(), "ratio": log_ratio.exp().sum()}
