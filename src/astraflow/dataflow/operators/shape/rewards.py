"""Operators that change rewards one by one: bounds, scale, running normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require, scored
from astraflow.types import Group


class RewardClip(Operator):
    """Bounds rewards: `min(max(r, low), high)`. Per-call rewards stay as they are."""

    phase = "shape"

    def __init__(self, *, low: float = -1.0, high: float = 1.0) -> None:
        require(low < high, "reward_clip.low", low, f"must be < high ({high})", "use low = -1, high = 1")
        self._low, self._high = low, high

    def on_group(self, group: Group) -> Group | str:
        group.rewards = [r if r is None else min(max(r, self._low), self._high) for r in group.rewards]
        return group


class RewardScale(Operator):
    """Scales rewards, and per-call rewards by the same factor: `factor * r + offset` (no offset per call)."""

    phase = "shape"

    def __init__(self, *, factor: float = 1.0, offset: float = 0.0) -> None:
        require(math.isfinite(factor), "reward_scale.factor", factor, "must be finite", "use 1")
        require(math.isfinite(offset), "reward_scale.offset", offset, "must be finite", "use 0")
        self._factor, self._offset = factor, offset

    def on_group(self, group: Group) -> Group | str:
        group.rewards = [r if r is None else self._factor * r + self._offset for r in group.rewards]
        group.rewards_per_call = [tuple(self._factor * r for r in calls) for calls in group.rewards_per_call]
        return group


class RewardNormalize(Operator):
    """`(r - mean) / (std + eps)` with mean and standard deviation of all rewards of this source so far, bounded.

    For sources whose rewards have different scales. A group counts before its own rewards are normalised; running
    sums are kept as Welford does it. State: three numbers per source.
    Args: center: False only divides. clip: bound of the result; 0: none.
    """

    phase = "shape"
    makes = ("normalized",)

    def __init__(self, *, center: bool = True, clip: float = 5.0, eps: float = 1e-6) -> None:
        require(clip >= 0, "reward_normalize.clip", clip, "must be >= 0", "use 5, or 0 for no bound")
        require(eps > 0, "reward_normalize.eps", eps, "must be > 0", "use 1e-6")
        self._center, self._clip, self._eps = center, clip or math.inf, eps
        self._sums: dict[str, tuple[int, float, float]] = {}  # source -> count, mean, sum of squared distances

    def on_group(self, group: Group) -> Group | str:
        count, mean, squares = self._sums.get(group.task.source, (0, 0.0, 0.0))
        for reward in scored(group.rewards):
            count += 1
            away = reward - mean
            mean += away / count
            squares += away * (reward - mean)
        self._sums[group.task.source] = (count, mean, squares)
        std = math.sqrt(squares / count) if count else 0.0
        scale = 1.0 / (std + self._eps) if std > self._eps else 1.0  # until rewards differ there is no scale
        start = mean if self._center else 0.0
        group.rewards = [
            r if r is None else min(max((r - start) * scale, -self._clip), self._clip) for r in group.rewards
        ]
        return group

    def state_dict(self) -> dict[str, Any]:
        return {source: list(sums) for source, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {source: (int(n), float(mean), float(sq)) for source, (n, mean, sq) in state.items()}
