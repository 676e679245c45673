"""One ratio per sequence."""

from __future__ import annotations

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.importance import log_ratios, sequence_sums
from astraflow.algorithms.losses.contract import LocalLoss, Metrics, Prepared, TrainedTokens, check_clip, clip_counts
from astraflow.algorithms.losses.ppo_clip import clipped_surrogate


class Gspo(LocalLoss):
    """Clipped surrogate of a sequence: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), where
    s = exp(mean over the sequence of log(pi / mu)), the same number for all its tokens.

    Tokens take part as sg[s] pi / sg[pi] (the paper's GSPO-token): with one advantage per sequence value and gradient
    are those of GSPO, and advantages per token keep their meaning. The clip is narrow since s is a mean.
    Source: GSPO, arXiv:2507.18071 equations 5 to 7, 13 and 14; the clip of its section 5.1.
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, aggregation: Aggregation = "sequence") -> None:
        super().__init__(aggregation)
        self.low, self.high = check_clip(clip_low, clip_high)

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        log_ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs)
        means = sequence_sums(log_ratio.detach(), tokens.sequences, len(tokens.lengths)) / tokens.lengths
        ratio = (means[tokens.sequences] + (log_ratio - log_ratio.detach())).exp()
        surrogate, active = clipped_surrogate(ratio, tokens.advantages, self.low, self.high)
        return -surrogate, clip_counts(active, means[tokens.sequences])
