"""PPO with three policies."""

from __future__ import annotations

from typing import Literal

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
from astraflow.algorithms.losses.ppo_clip import clipped_surrogate

Proximal = Literal["interpolated", "exact"]


class DecoupledPpo(LocalLoss):
    """Clip around a recent policy, weigh for the one that sampled:
    -sg[q / mu] min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / q, q the proximal policy.

    Clipping pi / mu would hold the policy back to where it was when the data were sampled.

    Args: max_weight: tokens of a larger q / mu are left out (AReaL: 5); 0: none.
    proximal: "exact": q is the policy before the first update on the batch; with one update per batch r is 1 and
    nothing clips. "interpolated": log q = log mu / d + (1 - 1/d) log pi for a token d >= 1 versions old (q = mu for
    d = 1), and q = pi for one of the version trained.
    Source: arXiv:2110.00641 section 3; AReaL, arXiv:2505.24298 equation 5; interpolation: A-3PO, arXiv:2512.06547.
    """

    corrects_off_policy = True

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, max_weight: float = 5.0,
        proximal: Proximal = "interpolated", aggregation: Aggregation = "token",
    ) -> None:  # fmt: skip
        super().__init__(aggregation)
        self.low, self.high = check_clip(clip_low, clip_high)
        check("max_weight", max_weight, max_weight == 0 or max_weight >= 1, "must be >= 1, or 0 for none", "use 5.0")
        check("proximal", proximal, proximal in ("interpolated", "exact"), "is not known", "use interpolated or exact")
        self.max_weight, self.interpolated = max_weight, proximal == "interpolated"
        self.needs_proximal = not self.interpolated

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        proximal = self._interpolated(tokens) if self.interpolated else tokens.proximal
        log_ratio = log_ratios(tokens.policy_logprobs, proximal)
        surrogate, active = clipped_surrogate(log_ratio.exp(), tokens.advantages, self.low, self.high)
        weight = log_ratios(proximal, tokens.behavior_logprobs).exp()
        dropped = weight > self.max_weight if self.max_weight else torch.zeros_like(active)
        return -torch.where(dropped, 0.0, weight) * surrogate, clip_counts(active, log_ratio) | {
            "policy/dropped_fraction": dropped.sum(),
            "policy/behavior_weight": weight.sum(),
        }

    @staticmethod
    def _interpolated(tokens: TrainedTokens) -> torch.Tensor:
        old = torch.where(tokens.staleness > 0, 1 / tokens.staleness.clamp(min=1), 0.0).to(tokens.behavior_logprobs)
        return torch.lerp(tokens.policy_logprobs.detach(), tokens.behavior_logprobs, old)
