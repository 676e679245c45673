"""Advantages normalised over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from astraflow.contracts import Operator
from astraflow.dataflow.operators.credit.relative import group_advantages
from astraflow.dataflow.operators.scored import require
from astraflow.types import Group


class ReinforcePp(Operator):
    """`A_i = (a_i - mean a) / (std a + eps)` over all episodes of the batch, with `a_i = r_i - b`.

    One scale for a batch: a group with almost equal rewards is not blown up, as GRPO's own division does. A batch of
    equal `a_i` gives exactly 0.
    Args: over: "batch"; or "source": mean and std over the episodes of its own source in the batch, for sources whose
        rewards have different scales.
    baseline: "none": b = 0; "group": b is the mean of the siblings (REINFORCE++-baseline).
    by: "episodes": each episode counts once in mean and std; "tokens": as often as it has sampled tokens.
    Source: REINFORCE++, arXiv:2501.03262 section 3.
    """

    phase = "credit"
    makes = ("normalized",)

    def __init__(
        self,
        *,
        over: Literal["batch", "source"] = "batch",
        baseline: Literal["none", "group"] = "none",
        by: Literal["episodes", "tokens"] = "episodes",
        eps: float = 1e-6,
    ) -> None:
        require(over in ("batch", "source"), "reinforce_pp.over", over, "must be batch or source", "use batch")
        require(baseline in ("none", "group"), "reinforce_pp.baseline", baseline, "must be none or group", "use none")
        require(by in ("episodes", "tokens"), "reinforce_pp.by", by, "must be episodes or tokens", "use episodes")
        require(eps > 0, "reinforce_pp.eps", eps, "must be > 0", "use 1e-6")
        self._over, self._baseline, self._by, self._eps = over, baseline, by, eps
        self.min_siblings = 2 if baseline == "group" else 1

    def on_group(self, group: Group) -> Group | str:
        if self._baseline == "group":
            group.advantages = group_advantages(group.rewards, normalize=False)
        else:
            group.advantages = [r if r is not None else 0.0 for r in group.rewards]
        return group

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        if self._over == "batch":
            self._normalize(groups)
            return
        for source in {g.task.source: None for g in groups}:
            self._normalize([g for g in groups if g.task.source == source])

    def _normalize(self, groups: Sequence[Group]) -> None:
        scored = np.array([r is not None for g in groups for r in g.rewards], bool)
        raw = np.array([a for g in groups for a in g.advantages or ()], np.float64)
        counts = np.array([n for g in groups for n in g.num_tokens], np.float64) * scored
        if self._by == "episodes":
            counts = scored.astype(np.float64)
        normal = np.zeros_like(raw)
        if counts.sum() and raw[scored].min() < raw[scored].max():
            mean = float(np.average(raw, weights=counts))
            std = float(np.sqrt(np.average((raw - mean) ** 2, weights=counts)))
            normal = np.where(scored, (raw - mean) / (std + self._eps), 0.0)
        start = 0
        for group in groups:
            end = start + len(group.rewards)
            group.advantages, start = normal[start:end].tolist(), end
