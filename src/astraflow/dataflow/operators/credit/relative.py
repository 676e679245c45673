"""Estimators that compare each episode with its siblings.

All count an episode once, however many branches it has; its branches share its advantage. Unscored episodes take no
part and get 0. A group of equal rewards, or of one scored episode, gives exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import mean_std, require, scored
from astraflow.types import Group


class Grpo(Operator):
    """`A_i = (r_i - mean r) / (std r + eps)`, without `/ std` when not `normalize`.

    Source: GRPO, arXiv:2402.03300 section 4.1.2.
    """

    phase = "credit"
    min_siblings = 2

    def __init__(self, *, eps: float = 1e-6, normalize: bool = True) -> None:
        require(eps > 0, "grpo.eps", eps, "must be > 0", "use 1e-6")
        self._eps, self._normalize = eps, normalize
        self.makes = ("normalized",) if normalize else ()

    def on_group(self, group: Group) -> Group | str:
        group.advantages = group_advantages(group.rewards, eps=self._eps, normalize=self._normalize)
        return group


class DrGrpo(Operator):
    """`A_i = r_i - mean r`: no division, which would weigh up tasks that are nearly always or nearly never solved.

    The paper's other half, no division by the length of an answer, is a number as `algorithm.loss.aggregation`.
    Source: Dr. GRPO, arXiv:2503.20783 section 3.
    """

    phase = "credit"
    min_siblings = 2

    def on_group(self, group: Group) -> Group | str:
        group.advantages = group_advantages(group.rewards, normalize=False)
        return group


class Rloo(Operator):
    """`A_i = r_i - mean of the other r_j`: an unbiased baseline; the same as `n / (n - 1) * (r_i - mean r)`.

    Source: RLOO, arXiv:2402.14740 (leave one out: Kool, van Hoof and Welling, 2019).
    """

    phase = "credit"
    min_siblings = 2

    def on_group(self, group: Group) -> Group | str:
        num = len(scored(group.rewards))
        scale = num / (num - 1) if num > 1 else 1.0
        group.advantages = [scale * a for a in group_advantages(group.rewards, normalize=False)]
        return group


def group_advantages(rewards: Sequence[float | None], *, eps: float = 1e-6, normalize: bool = True) -> list[float]:
    """[G] advantage per sibling; 0 for unscored ones (None or not finite). Example: [1, 0, None] -> [1, -1, 0]."""
    values = scored(rewards)
    if not values:
        return [0.0] * len(rewards)
    mean, std = mean_std(values)
    scale = 1.0 / (std + eps) if normalize and std else 1.0
    return [(r - mean) * scale if r is not None and math.isfinite(r) else 0.0 for r in rewards]
