"""Second-moment trust region."""

from __future__ import annotations

from typing import Literal

import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.algorithms.importance import log_ratios
from astraflow.algorithms.losses.contract import Metrics, Prepared, TrainedTokens, check, check_aggregation, clip_counts


class M2po:
    """Second-moment trust region: drop just so many extreme tokens that mean (log r)^2 of the rest is <= threshold.

    A fixed clip drops a share of tokens that grows with staleness, mostly unlikely, informative ones; the second moment
    leaves a batch alone as long as it is near as a whole. Which tokens count, and may be dropped:

    | tokens    | set                                                | dropped by                                      |
    |-----------|----------------------------------------------------|-------------------------------------------------|
    | "outward" | A > 0 and r > 1, or A < 0 and r < 1: their update  | a window [1/x, x] that clips as PPO's does;     |
    |           | moves the policy further away                      | x = exp of the largest |log r| that is kept     |
    | "all"     | all trained tokens                                 | a mask, M of -M r A                             |

    The moment is that of the whole update, as in the paper: a moment per microbatch would make gradients depend on how
    the batch was cut. Hence `needs_batch`. What `prepare` finds is a bound on |log r|, at most `max_log_ratio`
    (published systems clip r to [0.05, 21], that is 3); a counting token beyond it has no gradient. Where r is larger
    than that and the token does not count, its weight is held at the bound.

    Args: threshold: of the second moment; the paper uses 0.04 for all its models, smaller is more careful.
    Source: arXiv:2510.01161, section 4 and algorithm 1 ("all"); the authors' and AstraFlow's code ("outward").
    """

    needs_batch = True
    corrects_off_policy = True
    needs_proximal = False

    def __init__(
        self, threshold: float = 0.04, max_log_ratio: float = 3.0, tokens: Literal["outward", "all"] = "outward",
        aggregation: Aggregation = "token",
    ) -> None:  # fmt: skip
        check("threshold", threshold, threshold > 0, "must be > 0", "use 0.04")
        check("max_log_ratio", max_log_ratio, 0 < max_log_ratio <= 10, "must be in (0, 10]", "use 3.0")
        check("tokens", tokens, tokens in ("outward", "all"), "is not known", "use outward or all")
        self.threshold, self.max_log_ratio, self.tokens = threshold, max_log_ratio, tokens
        self.aggregation: Aggregation = check_aggregation(aggregation)

    @torch.no_grad()
    def prepare(self, tokens: TrainedTokens) -> Prepared:
        """The largest (log r)^2 that keeps its gradient: a scalar tensor, no synchronisation."""
        log_ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs)
        moments = torch.where(self._counts(log_ratio, tokens), log_ratio.square(), torch.inf).sort().values
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
        counts = self._counts(log_ratio, tokens)
        dropped = counts & (log_ratio.square() > limit)
        # A bad token that the policy made likelier (A < 0, r >> 1) must be pushed back, but not without bound.
        truncated = log_ratio - (log_ratio - self.max_log_ratio).clamp(min=0).detach()
        losses = -torch.where(dropped, log_ratio.sign() * limit.sqrt(), truncated).exp() * tokens.advantages
        if self.tokens == "all":
            losses = torch.where(dropped, 0.0, losses)
        with torch.no_grad():
            moment = torch.where(counts, log_ratio.square(), 0.0).sum()
        of = self.tokens
        sums = clip_counts(dropped, log_ratio) | {f"policy/{of}_m2": moment}
        return losses, sums if of == "all" else sums | {"policy/outward_fraction": counts.sum()}

    def _counts(self, log_ratio: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
        """[N] bool: the token is in the set whose second moment is bounded."""
        if self.tokens == "all":
            return torch.ones_like(log_ratio, dtype=torch.bool)
        return log_ratio * tokens.advantages.sign() > 0
