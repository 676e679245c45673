"""Second-moment trust region."""

from __future__ import annotations

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.importance import log_ratios
from astraflow.algorithms.losses.contract import Metrics, Prepared, TrainedTokens, check, check_aggregation


class M2po:
    """Second-moment trust region: drop just so many extreme tokens that mean (log r)^2 of the rest is <= threshold.

    Only tokens whose update moves the policy further away count (A > 0 and r > 1, or A < 0 and r < 1), and only these
    are dropped. A fixed clip drops a share of tokens that grows with staleness, mostly unlikely, informative ones;
    the second moment leaves a batch alone as long as it is near as a whole.

    The moment is that of the whole batch, as in the paper: a moment per microbatch would make gradients depend on how
    the batch was cut. Hence `needs_batch`. Dropping is done by a window on log r that `prepare` finds (a counting token
    outside has no gradient), at most `max_log_ratio` wide (published systems use r in [0.05, 21], that is 3).

    Args: threshold: of the second moment; the paper uses 0.04 for all its models, smaller is more careful.
    Source: arXiv:2510.01161, section 4 and algorithm 1.
    """

    needs_batch = True
    corrects_off_policy = True
    needs_proximal = False

    def __init__(self, threshold: float = 0.04, max_log_ratio: float = 3.0, aggregation: Aggregation = "token") -> None:
        check("threshold", threshold, threshold > 0, "must be > 0", "use 0.04")
        check("max_log_ratio", max_log_ratio, 0 < max_log_ratio <= 10, "must be in (0, 10]", "use 3.0")
        self.threshold, self.max_log_ratio = threshold, max_log_ratio
        self.aggregation: Aggregation = check_aggregation(aggregation)

    @torch.no_grad()
    def prepare(self, tokens: TrainedTokens) -> Prepared:
        """The largest (log r)^2 that keeps its gradient: a scalar tensor, no synchronisation."""
        log_ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs)
        outward = log_ratio * tokens.advantages.sign() > 0
        moments = torch.where(outward, log_ratio.square(), torch.inf).sort().values
        ranks = torch.arange(1, len(moments) + 1, device=moments.device)
        # The mean of the k smallest moments rises with k: the kept ones are a prefix. inf: the token does not count.
        kept = moments.double().cumsum(0) <= self.threshold * ranks
        largest = torch.where(kept, moments, 0.0).amax() if len(moments) else moments.new_zeros(())
        everything = (kept | moments.isinf()).all()
        limit = log_ratio.new_tensor(self.max_log_ratio**2)
        return torch.where(everything, limit, torch.minimum(largest, limit))

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        limit = self.prepare(tokens) if prepared is None else prepared
        assert limit is not None
        log_ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs)
        outward = log_ratio * tokens.advantages.sign() > 0
        dropped = outward & (log_ratio.square() > limit)
        # A bad token that the policy made likelier (A < 0, r >> 1) must be pushed back, but not without bound.
        truncated = log_ratio - (log_ratio - self.max_log_ratio).clamp(min=0).detach()
        inside = torch.where(dropped, log_ratio.sign() * limit.sqrt(), truncated)
        with torch.no_grad():
            moment = torch.where(outward, log_ratio.square(), 0.0).sum()
        return -inside.exp() * tokens.advantages, {
            "policy/clip_fraction": dropped.sum(),
            "policy/outward_fraction": outward.sum(),
            "policy/outward_m2": moment,
        }
