"""What operators of a source learn from a complete group."""

from __future__ import annotations

import math

from astraflow.dataflow.operators.scored import scored
from astraflow.types import Group


def success_rate(group: Group, threshold: float) -> float | None:
    """Mean success of the scored episodes: metric "success", else a reward of at least `threshold`. None: none."""
    values = [
        float(metrics.get("success", reward >= threshold))
        for reward, metrics in zip(group.rewards, group.metrics, strict=True)
        if reward is not None and math.isfinite(reward)
    ]
    return math.fsum(values) / len(values) if values else None


def equal_reward(group: Group) -> tuple[bool, float] | None:
    """Whether all scored episodes have the same reward, also per call, and its mean; None: fewer than two are scored.

    Rewards per call count whatever the estimator makes of them: a task that may still teach is not skipped.
    """
    rewards = scored(group.rewards)
    if len(rewards) < 2:
        return None
    calls = {tuple(c) for c, r in zip(group.rewards_per_call, group.rewards, strict=True) if r is not None}
    return min(rewards) == max(rewards) and len(calls) == 1, math.fsum(rewards) / len(rewards)
