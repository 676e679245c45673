"""Policy losses: one class per paper, constructed from the options of `algorithm.loss` in the run file.

A loss is called once per microbatch on its N trained tokens and returns a loss per token and metrics as sums over
these tokens (`policy/clip_fraction` is a count: divided by the tokens of the batch it is a share). It never looks at
other microbatches; what must be known of the whole batch first is computed once by `prepare` from all its tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch

from astraflow.algorithms.aggregate import AGGREGATIONS, Aggregation
from astraflow.algorithms.importance import log_ratios
from astraflow.errors import Problem

Metrics = dict[str, torch.Tensor]
Prepared = torch.Tensor | None


class PolicyLoss(Protocol):
    """What the trainer asks of a loss."""

    aggregation: Aggregation
    needs_batch: bool
    """True: `prepare` must see all trained tokens of the batch before the first gradient (one more forward pass when
    the batch is more than one microbatch)."""
    corrects_off_policy: bool
    """True: made for data of versions far behind the trainer's, as replay of more than `batch.max_staleness` gives."""

    def prepare(
        self, policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> Prepared:
        """What `__call__` needs to know of the whole batch. All arguments [N] over the batch, no gradient."""

    def __call__(
        self,
        policy_logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        prepared: Prepared = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """Loss per token [N] and sums over the tokens. `prepared` None: these tokens are the whole batch."""


class PpoClip:
    """Clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / mu per token.

    Args: clip_low, clip_high: a higher upper bound leaves room for unlikely tokens (DAPO "clip-higher").
    dual_clip: c > 1 bounds the loss of A < 0 by -c A, against huge ratios; 0: off.
    Source: PPO, arXiv:1707.06347 equation 7; dual clip: arXiv:1912.09729 equation 5.
    """

    needs_batch = False
    corrects_off_policy = False

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float = 0.0,
        aggregation: Aggregation = "token",
    ) -> None:
        _check("clip_low", clip_low, 0 < clip_low < 1, "must be between 0 and 1", "use 0.2")
        _check("clip_high", clip_high, clip_high > 0, "must be > 0", "use 0.2")
        _check("dual_clip", dual_clip, dual_clip == 0 or dual_clip > 1, "must be > 1, or 0 for off", "use 3.0 or 0")
        self.low, self.high, self.dual_clip = 1 - clip_low, 1 + clip_high, dual_clip
        self.aggregation = _aggregation(aggregation)

    def prepare(
        self, policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> Prepared:
        """Nothing: each token stands for itself."""
        return None

    def __call__(
        self,
        policy_logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        prepared: Prepared = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        ratio = log_ratios(policy_logprobs, behavior_logprobs).exp()
        plain, clipped = ratio * advantages, ratio.clamp(self.low, self.high) * advantages
        surrogate = torch.minimum(plain, clipped)
        active = clipped < plain
        if self.dual_clip:
            floor = self.dual_clip * advantages
            active |= (advantages < 0) & (surrogate < floor)
            surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
        return -surrogate, {"policy/clip_fraction": active.sum()}


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

    def __init__(self, threshold: float = 0.04, max_log_ratio: float = 3.0, aggregation: Aggregation = "token") -> None:
        _check("threshold", threshold, threshold > 0, "must be > 0", "use 0.04")
        _check("max_log_ratio", max_log_ratio, 0 < max_log_ratio <= 10, "must be in (0, 10]", "use 3.0")
        self.threshold, self.max_log_ratio = threshold, max_log_ratio
        self.aggregation = _aggregation(aggregation)

    @torch.no_grad()
    def prepare(
        self, policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> Prepared:
        """The largest (log r)^2 that keeps its gradient: a scalar tensor, no synchronisation."""
        log_ratio = log_ratios(policy_logprobs, behavior_logprobs)
        outward = log_ratio * advantages.sign() > 0
        moments = torch.where(outward, log_ratio.square(), torch.inf).sort().values
        ranks = torch.arange(1, len(moments) + 1, device=moments.device)
        # The mean of the k smallest moments rises with k: the kept ones are a prefix. inf: the token does not count.
        kept = moments.double().cumsum(0) <= self.threshold * ranks
        largest = torch.where(kept, moments, 0.0).amax() if len(moments) else moments.new_zeros(())
        everything = (kept | moments.isinf()).all()
        limit = log_ratio.new_tensor(self.max_log_ratio**2)
        return torch.where(everything, limit, torch.minimum(largest, limit))

    def __call__(
        self,
        policy_logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        prepared: Prepared = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        limit = self.prepare(policy_logprobs, behavior_logprobs, advantages) if prepared is None else prepared
        assert limit is not None
        log_ratio = log_ratios(policy_logprobs, behavior_logprobs)
        outward = log_ratio * advantages.sign() > 0
        dropped = outward & (log_ratio.square() > limit)
        # A bad token that the policy made likelier (A < 0, r >> 1) must be pushed back, but not without bound.
        truncated = log_ratio - (log_ratio - self.max_log_ratio).clamp(min=0).detach()
        inside = torch.where(dropped, log_ratio.sign() * limit.sqrt(), truncated)
        with torch.no_grad():
            moment = torch.where(outward, log_ratio.square(), 0.0).sum()
        return -inside.exp() * advantages, {
            "policy/clip_fraction": dropped.sum(),
            "policy/outward_fraction": outward.sum(),
            "policy/outward_m2": moment,
        }


def _aggregation(value: Aggregation) -> Aggregation:
    _check("aggregation", value, value in AGGREGATIONS, "is not known", f"use one of {', '.join(AGGREGATIONS)}")
    return value


def _check(name: str, value: object, ok: bool, rule: str, fix: str) -> None:
    if not ok:
        raise Problem(f"algorithm.loss.{name}", value, rule, fix)
