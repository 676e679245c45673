"""A soft gate in the place of the clip."""

from __future__ import annotations

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.importance import log_ratios
from astraflow.algorithms.losses.contract import LocalLoss, Metrics, Prepared, TrainedTokens, check


class Sapo(LocalLoss):
    """Soft gate: -(4 / tau) sigmoid(tau (r - 1)) A, r = pi / mu per token; tau is `tau_positive` where A > 0, else
    `tau_negative`.

    The gradient is that of r A times 4 p (1 - p), p the sigmoid: 1 at r = 1, and it fades with the distance instead
    of ending. `policy/gate` is its mean.
    Args: tau_negative: larger fades sooner; updates against a token disturb all others, hence the larger default.
    Source: SAPO, arXiv:2511.20347.
    """

    def __init__(
        self, tau_positive: float = 1.0, tau_negative: float = 1.05, aggregation: Aggregation = "sequence"
    ) -> None:
        super().__init__(aggregation)
        check("tau_positive", tau_positive, tau_positive > 0, "must be > 0", "use 1.0")
        check("tau_negative", tau_negative, tau_negative > 0, "must be > 0", "use 1.05")
        self.tau_positive, self.tau_negative = tau_positive, tau_negative

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs).exp()
        positive, negative = ratio.new_tensor(self.tau_positive), ratio.new_tensor(self.tau_negative)
        tau = torch.where(tokens.advantages > 0, positive, negative)
        gate = torch.sigmoid(tau * (ratio - 1))
        slope = 4 * gate.detach() * (1 - gate.detach())
        return -4 / tau * gate * tokens.advantages, {"policy/gate": slope.sum()}
