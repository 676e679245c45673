"""What a workflow returned, as an Outcome; what it raised, as the episode's error. Never a silent zero."""

from __future__ import annotations

import math
from collections.abc import Mapping

from astraflow.errors import EpisodeError
from astraflow.types import Outcome


def outcome_of(value: object) -> Outcome:
    """A float, a dict of floats by policy, an Outcome, or None (unscored).

    Raises: EpisodeError: "reward: ..." for anything else, and for NaN and infinities.
    """
    if isinstance(value, Outcome):
        outcome = value
    elif isinstance(value, Mapping):
        outcome = Outcome(reward={str(policy): _number(reward) for policy, reward in value.items()})
    else:
        outcome = Outcome(reward=_number(value))
    _check(outcome)
    return outcome


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return float(value)
    try:  # numpy scalars and the like
        return float(value.__float__())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        raise EpisodeError(
            f"reward: {type(value).__name__} {value!r:.80} is not a number; return a float, a dict of floats by "
            "policy, an Outcome, or None for unscored"
        ) from None


def _check(outcome: Outcome) -> None:
    rewards = outcome.reward if isinstance(outcome.reward, Mapping) else {"reward": outcome.reward}
    for name, value in rewards.items():
        number = _number(value)
        if number is not None and not math.isfinite(number):
            raise EpisodeError(f"reward: {name}={number} is not finite; return None for unscored")
    for policy, per_call in outcome.rewards_per_call.items():
        if not all(isinstance(r, int | float) and math.isfinite(r) for r in per_call):
            raise EpisodeError(f"reward: rewards_per_call[{policy!r}]={per_call!r:.80} must be finite numbers")
    for name, metric in outcome.metrics.items():
        if not isinstance(metric, int | float) or not math.isfinite(metric):
            raise EpisodeError(f"reward: metrics[{name!r}]={metric!r:.80} must be a finite number")
