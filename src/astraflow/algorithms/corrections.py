"""What makes a loss right, or careful, on data of older policies or of an engine that computes otherwise.

A correction gives a factor per token by which its loss is multiplied; several are multiplied. Ratios are those of the
policy before the first update on the batch to the one that sampled, without gradient: r per token, or of a whole
sequence the product of its tokens'. The denominators of the aggregation stay: what is left out counts as zero.

A correction that weighs (truncate, mask) makes the data those of the policy before the update; the loss then measures
its own ratio from there, or the same ratio would count twice. Corrections may be those of one engine: then all of this
holds for what it sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import torch

from astraflow.algorithms.importance import MAX_LOG_RATIO, log_ratios, sequence_sums
from astraflow.algorithms.losses.contract import Metrics, PolicyLoss, Prepared, TrainedTokens
from astraflow.errors import Problem

Level = Literal["token", "sequence"]
_Part = tuple[list["Correction"], TrainedTokens, torch.Tensor | None]  # the last: places of the tokens; None: all


class Correction(Protocol):
    """What the trainer asks of a correction."""

    weighs: bool
    """True: the factors make up for the distance to the behaviour."""

    def __call__(self, tokens: TrainedTokens) -> tuple[torch.Tensor, Metrics]:
        """Factors [N] without gradient, and sums over the tokens."""


class Corrected:
    """A loss with corrections, itself a loss.

    Args: anchored: the loss measures its ratio from the policy before the first update on the batch also without a
    correction that weighs: what clips is then the distance of the updates, not that to the behaviour. by_engine: engine
    -> corrections of the sequences that it sampled, instead of `corrections`.
    """

    def __init__(
        self,
        loss: PolicyLoss,
        corrections: list[Correction],
        anchored: bool = False,
        by_engine: Mapping[str, list[Correction]] | None = None,
    ) -> None:
        self.loss, self.corrections, self.by_engine = loss, corrections, dict(by_engine or {})
        self.aggregation, self.needs_batch = loss.aggregation, loss.needs_batch
        self.anchored, lists = anchored, [corrections, *self.by_engine.values()]
        self._weighs = any(map(_weighs, lists))
        self.needs_proximal = anchored or any(lists) or loss.needs_proximal
        self.corrects_off_policy = loss.corrects_off_policy or all(map(_weighs, lists))

    def prepare(self, tokens: TrainedTokens) -> Prepared:
        """See `PolicyLoss`."""
        return self.loss.prepare(self._seen(tokens))

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        losses, sums = self.loss(self._seen(tokens), prepared)
        weight = torch.ones_like(tokens.behavior_logprobs)
        for corrections, part, places in self._parts(tokens):
            for correction in corrections:
                own, more = correction(part)
                factors = own if places is None else torch.ones_like(weight).index_copy(0, places, own)
                losses = losses * factors
                if correction.weighs:
                    weight = weight * factors
                sums = sums | {name: sums[name] + value if name in sums else value for name, value in more.items()}
        return losses, sums | {"correction/weight": weight.sum()} if self._weighs else sums

    def _parts(self, tokens: TrainedTokens) -> list[_Part]:
        """Every list of corrections, also with no token: all ranks sum up the same names."""
        if not self.by_engine:
            return [(self.corrections, tokens, None)]
        engines = np.full(len(tokens.lengths), "") if tokens.engines is None else tokens.engines
        other = ~np.isin(engines, list(self.by_engine))
        own = [(corrections, engines == engine) for engine, corrections in self.by_engine.items()]
        return [
            (corrections, tokens, None) if chosen.all() else (corrections, *tokens.of_sequences(chosen))
            for corrections, chosen in [(self.corrections, other), *own]
        ]

    def _seen(self, tokens: TrainedTokens) -> TrainedTokens:
        if self.anchored:
            return replace(tokens, behavior_logprobs=tokens.proximal)
        seen = tokens.behavior_logprobs
        for corrections, part, places in self._parts(tokens) if self._weighs else []:
            if _weighs(corrections):
                seen = part.proximal if places is None else seen.index_copy(0, places, part.proximal)
        return replace(tokens, behavior_logprobs=seen)


def _weighs(corrections: list[Correction]) -> bool:
    return any(correction.weighs for correction in corrections)


class Truncate:
    """Truncated importance sampling: min(r, high). Never without bound, at the price of a bias.

    Args: level: "sequence" is the unbiased weight of whole sequences before it is truncated, of more variance.
    Source: Ionides, "Truncated importance sampling", J. Comp. Graph. Stat. 17(2), 2008; per token: IMPALA,
    arXiv:1802.01561 section 4.1.
    """

    weighs = True

    def __init__(self, high: float = 2.0, level: Level = "token") -> None:
        _check("high", high, high >= 1, "must be >= 1", "use 2.0")
        self.high, self.level = high, _level(level)

    @torch.no_grad()
    def __call__(self, tokens: TrainedTokens) -> tuple[torch.Tensor, Metrics]:
        """See `Correction`."""
        ratio = _log_ratios_at(tokens, self.level).exp()
        factors = ratio.clamp(max=self.high)
        return factors, {"correction/truncated": (ratio > self.high).sum()}


class Mask:
    """Masked importance sampling: r inside [low, high], else 0. What is far away teaches nothing.

    Args: level: as of `Truncate`; per sequence the bounds must be wider.
    Source: IcePop in Ring-1T, arXiv:2510.18855.
    """

    weighs = True

    def __init__(self, low: float = 0.5, high: float = 5.0, level: Level = "token") -> None:
        _check_window(low, high, "use 0.5 and 5.0")
        self.low, self.high, self.level = low, high, _level(level)

    @torch.no_grad()
    def __call__(self, tokens: TrainedTokens) -> tuple[torch.Tensor, Metrics]:
        """See `Correction`."""
        ratio = _log_ratios_at(tokens, self.level).exp()
        outside = (ratio < self.low) | (ratio > self.high)
        factors = torch.where(outside, 0.0, ratio)
        return factors, {"correction/masked": outside.sum()}


class Reject:
    """Leaves out whole sequences: those whose geometric mean of r is outside [low, high], and those with any token of
    r < min_token_ratio, one that the policy would hardly say. It does not weigh: use it with any loss.

    Source: Liu et al., "When speed kills stability", 2025 (on the mismatch of training and inference).
    """

    weighs = False

    def __init__(self, low: float = 0.5, high: float = 2.0, min_token_ratio: float = 1e-4) -> None:
        _check_window(low, high, "use 0.5 and 2.0")
        _check("min_token_ratio", min_token_ratio, 0 <= min_token_ratio < 1, "must be in [0, 1)", "use 1e-4, or 0: off")
        self.low, self.high, self.min_token_ratio = low, high, min_token_ratio

    @torch.no_grad()
    def __call__(self, tokens: TrainedTokens) -> tuple[torch.Tensor, Metrics]:
        """See `Correction`."""
        log_ratio = log_ratios(tokens.proximal, tokens.behavior_logprobs)
        mean = (sequence_sums(log_ratio, tokens.sequences, len(tokens.lengths)) / tokens.lengths).exp()
        unlikely = (log_ratio.exp() < self.min_token_ratio).to(log_ratio.dtype)
        veto = sequence_sums(unlikely, tokens.sequences, len(tokens.lengths)) > 0
        rejected = ((mean < self.low) | (mean > self.high) | veto)[tokens.sequences]
        return (~rejected).to(log_ratio.dtype), {"correction/rejected": rejected.sum()}


def _log_ratios_at(tokens: TrainedTokens, level: Level) -> torch.Tensor:
    """log r [N] of each token, or of the sequence that it is in."""
    log_ratio = log_ratios(tokens.proximal, tokens.behavior_logprobs)
    if level == "token":
        return log_ratio
    whole = sequence_sums(log_ratio, tokens.sequences, len(tokens.lengths))
    return whole.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[tokens.sequences]


def _level(value: Level) -> Level:
    _check("level", value, value in ("token", "sequence"), "is not known", "use token or sequence")
    return value


def _check_window(low: float, high: float, fix: str) -> None:
    _check("low", low, 0 <= low < 1, "must be in [0, 1)", fix)
    _check("high", high, high > 1, "must be > 1", fix)


def _check(name: str, value: object, ok: bool, rule: str, fix: str) -> None:
    if not ok:
        raise Problem(f"algorithm.corrections.{name}", value, rule, fix)
