"""Where the speed-up appears and vanishes: ratio of rollout to training time, tails, staleness, policies. Simulated.

One node plays exactly one batch at once (32 groups of 8, 200 tokens a call on average, decode steps of 20 ms + 0.1 ms a
row), so nothing is gained by more parallelism; what differs is only who waits for whom. `barrier` is the synchronous
loop around the trainer. Training time is a share of the rollout time of the same episodes behind the barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.scaling.cases import config_of, mean_step_s, profile

RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
TAILS = (0.0, 0.5, 1.0, 1.5)
STALENESS = (0, 1, 2, 4, 8)
POLICIES = (1, 2, 3, 5, 8)


def costs_of(spread: float, train_s: float) -> dict[str, Any]:
    """`spread`: sigma of tokens."""
    return {
        "engine": {"step_s": 0.02, "row_s": 1e-4},
        "trainer": {"step_s": train_s},
        "episode": {"calls": [{"tokens": 200, "spread": spread}]},
        "serving": {"request_s": 0.001},
    }


def rollout_s(policies: int, spread: float) -> float:
    """Of one batch behind the barrier."""
    config = config_of(policies=policies)
    return mean_step_s(config, profile(config, costs_of(spread, 0.0)), barrier=True)


def speed_up(policies: int, spread: float, ratio: float, staleness: int, played_s: float) -> float:
    """Of ours over the barrier. `ratio`: rollout over training of all policies, one after the other."""
    train_s = played_s / ratio / policies
    config = config_of(policies=policies, staleness=staleness)
    costs = profile(config, costs_of(spread, train_s))
    return mean_step_s(config, costs, barrier=True) / mean_step_s(config, costs)


def rows() -> Iterator[dict[str, Any]]:
    """All tables; `table` names them."""
    for spread in TAILS:
        played_s = rollout_s(1, spread)
        row: dict[str, Any] = {"part": "sweep", "table": "ratio", "tail": spread, "rollout_s": round(played_s, 2)}
        yield row | {f"x{ratio:g}": round(speed_up(1, spread, ratio, 1, played_s), 2) for ratio in RATIOS}
    for spread in TAILS:
        played_s = rollout_s(1, spread)
        row = {"part": "sweep", "table": "staleness", "tail": spread, "ratio": 2.0}
        yield row | {f"s{s}": round(speed_up(1, spread, 2.0, s, played_s), 2) for s in STALENESS}
    for policies in POLICIES:
        row = {"part": "sweep", "table": "policies", "policies": policies, "ratio": 2.0}
        spans = {spread: rollout_s(policies, spread) for spread in TAILS}
        yield row | {f"t{spread:g}": round(speed_up(policies, spread, 2.0, 2, s), 2) for spread, s in spans.items()}
