"""An operator that drops groups without a signal."""

from __future__ import annotations

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import mean_std, require, scored
from astraflow.types import Group


class ZeroVariance(Operator):
    """Drops a group whose scored episodes have the same reward: every group-relative advantage would be 0. One that
    the estimator tells apart all the same stays: with `per_call` the rewards of calls may differ.

    A dropped group frees its slot, so another task is admitted in its place and the batch keeps its size: that is
    dynamic sampling. `batch.max_dropped_groups` bounds how many are dropped without one batch.
    Args: min_std: groups whose rewards have a standard deviation up to this are dropped too; with `per_call` those
    whose returns have no more for any call.
    Source: DAPO, arXiv:2503.14476 section 3.2.
    """

    makes = ("the choice of equal groups",)
    min_siblings = 2

    def __init__(self, *, min_std: float = 0.0) -> None:
        require(min_std >= 0, "zero_variance.min_std", min_std, "must be >= 0", "use 0 for equal rewards only")
        self._min_std = min_std

    def on_group(self, group: Group) -> Group | str:
        rewards = scored(group.rewards)
        if rewards and mean_std(rewards)[1] > self._min_std:
            return group
        if self.estimator is not None and self.estimator.sees_difference(group, self._min_std):
            return group
        return "zero_variance"
