"""Policy gradient with a clipped importance weight."""

from __future__ import annotations

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.importance import log_ratios
from astraflow.algorithms.losses.contract import LocalLoss, Metrics, Prepared, TrainedTokens, check_clip, clip_counts


class Cispo(LocalLoss):
    """Clipped weights, not clipped updates: -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi, r = pi / mu per token.

    No token loses its gradient, also not an unlikely one whose ratio is large; its weight is bounded.
    Args: clip_low: 1: no lower bound, as in the paper. clip_high: 4: weights up to 5 (arXiv:2510.13786 section 3.2).
    Source: MiniMax-M1, arXiv:2506.13585 equations 4 and 5.
    """

    def __init__(self, clip_low: float = 1.0, clip_high: float = 4.0, aggregation: Aggregation = "token") -> None:
        super().__init__(aggregation)
        self.low, self.high = check_clip(clip_low, clip_high)

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        log_ratio = log_ratios(tokens.policy_logprobs.detach(), tokens.behavior_logprobs)
        ratio = log_ratio.exp()
        weight = ratio.clamp(self.low, self.high)
        losses = -weight * tokens.advantages * tokens.policy_logprobs
        return losses, clip_counts(weight != ratio, log_ratio)
