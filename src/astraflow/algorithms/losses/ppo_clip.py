"""PPO's clipped surrogate, which GRPO and DAPO share."""

from __future__ import annotations

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.importance import log_ratios
from astraflow.algorithms.losses.contract import (
    LocalLoss,
    Metrics,
    Prepared,
    TrainedTokens,
    check,
    check_clip,
    clip_counts,
)


class PpoClip(LocalLoss):
    """Clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / mu per token.

    GRPO is this with aggregation "sequence"; DAPO is this with clip_high 0.28 and aggregation "token".

    Args: clip_low, clip_high: a higher upper bound leaves room for unlikely tokens (DAPO "clip-higher").
    dual_clip: c > 1 bounds the loss of A < 0 by -c A, against huge ratios; 0: off.
    Source: PPO, arXiv:1707.06347 equation 7; dual clip: arXiv:1912.09729 equation 5; GRPO: arXiv:2402.03300 equation
    3; DAPO: arXiv:2503.14476 equation 8.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float = 0.0,
        aggregation: Aggregation = "token",
    ) -> None:
        super().__init__(aggregation)
        check("clip_low", clip_low, clip_low < 1, "must be between 0 and 1", "use 0.2")
        check("dual_clip", dual_clip, dual_clip == 0 or dual_clip > 1, "must be > 1, or 0 for off", "use 3.0 or 0")
        self.low, self.high = check_clip(clip_low, clip_high)
        self.dual_clip = dual_clip

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        log_ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs)
        ratio = log_ratio.exp()
        surrogate, active = clipped_surrogate(ratio, tokens.advantages, self.low, self.high)
        if self.dual_clip:
            floor = self.dual_clip * tokens.advantages
            bad = tokens.advantages < 0
            active |= bad & (surrogate < floor)
            surrogate = torch.where(bad, torch.maximum(surrogate, floor), surrogate)
        return -surrogate, clip_counts(active, log_ratio)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, low, high) A) [N], and where the clipped one is it [N] bool: there the gradient is zero."""
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    return torch.minimum(plain, clipped), clipped < plain
