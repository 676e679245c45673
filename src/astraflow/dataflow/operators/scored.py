"""What several operators need: the scored ones among siblings, their mean and spread, and checks of options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from astraflow.errors import DataflowError
from astraflow.types import Group


def scored(rewards: Iterable[float | None]) -> list[float]:
    """Rewards that take part in a baseline: neither None nor NaN nor infinite."""
    return [r for r in rewards if r is not None and math.isfinite(r)]


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of the whole population); (v, exactly 0) when all are equal. Not for none."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def leave_out(group: Group, unwanted: Iterable[int], reason: str, min_episodes: int) -> Group | str:
    """The group with the episodes at these positions unscored, or `reason` when fewer than `min_episodes` are left."""
    for k in unwanted:
        group.rewards[k] = None
    return group if len(scored(group.rewards)) >= min_episodes else reason


def require(ok: bool, option: str, value: object, rule: str, fix: str) -> None:
    """Raises: DataflowError: the value of `<operator>.<option>` breaks its rule."""
    if not ok:
        raise DataflowError(option, value, rule, fix)
