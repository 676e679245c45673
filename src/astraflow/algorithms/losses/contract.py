"""What a policy loss is given and what it gives: one class per paper, one module each, in this folder.

A loss is constructed from the options of `algorithm.loss` in the run file and called once per microbatch. It returns a
loss per token and metrics as sums over these tokens (`policy/clip_fraction` is a count: divided by the tokens of the
batch it is a share). It never looks at other microbatches; what must be known of the whole batch first is computed
once by `prepare`. No microbatch cuts a sequence, so a loss of whole sequences needs no preparation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from astraflow.algorithms.aggregate import Aggregation
from astraflow.errors import Problem

Metrics = dict[str, torch.Tensor]
Prepared = torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """The N trained tokens of S whole sequences, sequence by sequence. Only `policy_logprobs` has a gradient."""

    policy_logprobs: torch.Tensor  # [N] under the weights as they are now
    behavior_logprobs: torch.Tensor  # [N] as sampled
    advantages: torch.Tensor  # [N]
    sequences: torch.Tensor  # [N] int64 into [S], rising
    lengths: torch.Tensor  # [S] trained tokens of each sequence, as floats, each >= 1
    staleness: torch.Tensor  # [N] the trainer's version minus that of the token, as floats
    proximal_logprobs: torch.Tensor | None = None  # [N] before the first update on this batch; None: this is it
    engines: np.ndarray | None = None  # [S] str, what sampled each sequence; None: not known

    @classmethod
    def of(
        cls, policy_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, advantages: torch.Tensor,
        lengths: torch.Tensor, staleness: torch.Tensor | None = None,
    ) -> TrainedTokens:  # fmt: skip
        """Tokens of sequences of `lengths` [S] whole numbers, end to end. Args: staleness: [N]; None: 0."""
        numbers = torch.arange(len(lengths), device=lengths.device)
        return cls(
            policy_logprobs,
            behavior_logprobs,
            advantages,
            sequences=torch.repeat_interleave(numbers, lengths, output_size=len(policy_logprobs)),
            lengths=lengths.to(policy_logprobs.dtype),
            staleness=torch.zeros_like(behavior_logprobs) if staleness is None else staleness,
        )

    def of_sequences(self, chosen: np.ndarray) -> tuple[TrainedTokens, torch.Tensor]:
        """These sequences ([S] bool) alone, and the places [n] of their tokens among all."""
        of_them = torch.from_numpy(chosen).to(self.sequences.device)
        places = of_them[self.sequences].nonzero()[:, 0]
        numbers = of_them.cumsum(0) - 1
        parts = TrainedTokens(
            self.policy_logprobs[places],
            self.behavior_logprobs[places],
            self.advantages[places],
            sequences=numbers[self.sequences[places]],
            lengths=self.lengths[of_them],
            staleness=self.staleness[places],
            proximal_logprobs=None if self.proximal_logprobs is None else self.proximal_logprobs[places],
            engines=None if self.engines is None else self.engines[chosen],
        )
        return parts, places

    @property
    def proximal(self) -> torch.Tensor:
        """[N] logprobs under the weights before the first update on this batch, no gradient."""
        return self.policy_logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs


class PolicyLoss(Protocol):
    """What the trainer asks of a loss."""

    aggregation: Aggregation
    needs_batch: bool
    """True: `prepare` must see all trained tokens of an update before its first gradient (one more forward pass when
    they are more than one microbatch)."""
    corrects_off_policy: bool
    """True: made for data of versions far behind the trainer's, as replay of more than `batch.max_staleness` gives."""
    needs_proximal: bool
    """True: it reads `TrainedTokens.proximal` (one more forward pass when a step takes several updates)."""

    def prepare(self, tokens: TrainedTokens) -> Prepared:
        """What `__call__` needs to know of the whole batch, which `tokens` is. No gradient."""

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """Loss per token [N] and sums over the tokens. `prepared` None: these tokens are the whole batch."""


class LocalLoss:
    """Base of the losses to which other sequences of the batch do not matter."""

    needs_batch = False
    corrects_off_policy = False
    needs_proximal = False

    def __init__(self, aggregation: Aggregation) -> None:
        self.aggregation: Aggregation = check_aggregation(aggregation)

    def prepare(self, tokens: TrainedTokens) -> Prepared:
        """Nothing."""
        return None


def clip_counts(clipped: torch.Tensor, log_ratio: torch.Tensor) -> Metrics:
    """Of the tokens [N] bool whose gradient or weight was cut: all, those below 1 and those above."""
    low, high = clipped & (log_ratio < 0), clipped & (log_ratio > 0)
    return {
        "policy/clip_fraction": clipped.sum(),
        "policy/clip_low_fraction": low.sum(),
        "policy/clip_high_fraction": high.sum(),
    }


def check_aggregation(value: Aggregation) -> Aggregation:
    """`value`. Raises: Problem: it is neither a known name nor a positive number."""
    known = value in ("token", "sequence") if isinstance(value, str) else value > 0
    check("aggregation", value, known, "is not known", "use token, sequence, or a number of tokens > 0")
    return value


def check_clip(low: float, high: float) -> tuple[float, float]:
    """The window [1 - low, 1 + high] of a ratio. Raises: Problem: it is none."""
    check("clip_low", low, 0 < low <= 1, "must be in (0, 1]", "leave it out for the default of this loss")
    check("clip_high", high, high > 0, "must be > 0", "leave it out for the default of this loss")
    return 1 - low, 1 + high


def check(name: str, value: object, ok: bool, rule: str, fix: str) -> None:
    """Raises: Problem: option `name` of a loss is not `ok`."""
    if not ok:
        raise Problem(f"algorithm.loss.{name}", value, rule, fix)
