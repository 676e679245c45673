"""The plain policy gradient."""

from __future__ import annotations

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.losses.contract import LocalLoss, Metrics, Prepared, TrainedTokens


class Reinforce(LocalLoss):
    """Policy gradient without ratio or bound: -A log pi per token.

    Right for data of the policy as it is; for older data add a correction that weighs (`algorithm.corrections`).
    Source: Williams, "Simple statistical gradient-following algorithms", Machine Learning 8, 1992.
    """

    def __init__(self, aggregation: Aggregation = "token") -> None:
        super().__init__(aggregation)

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        return -tokens.advantages * tokens.policy_logprobs, {}
