"""What samples say of a share: intervals over tasks, pass@k without bias, paired differences. Pure arithmetic.

Tasks are drawn, the samples of one task are not independent of each other: a task is a cluster (Miller 2024, "Adding
error bars to evals", arXiv:2411.00640). Every interval here is Wilson's score interval (1927) of an effective sample
size n / deff (Kish 1965; Dean and Pagano 2015 for this use), which stays inside [0, 1] and does not shrink to nothing
where every sample succeeded or none did. With one sample of each task it is exactly Wilson's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec

LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Interval(NamedTuple):
    """At `LEVEL`."""

    low: float
    high: float


class Difference(NamedTuple):
    """Second less first, over the same tasks."""

    mean: float
    low: float
    high: float


class TaskMeans(msgspec.Struct):
    """Sums over tasks of a share of each: what a mean and its interval need, whatever the number of tasks."""

    num_tasks: int = 0
    num_episodes: int = 0  # behind them
    total: float = 0.0
    squares: float = 0.0

    def add(self, share: float, num_episodes: int) -> None:
        """One task. A share outside [0, 1] counts as the nearer end."""
        share = min(max(share, 0.0), 1.0)
        self.num_tasks += 1
        self.num_episodes += num_episodes
        self.total += share
        self.squares += share * share

    @property
    def mean(self) -> float | None:
        """Every task weighs alike. None: no task."""
        return min(self.total / self.num_tasks, 1.0) if self.num_tasks else None

    @property
    def effective_size(self) -> float:
        """Independent samples that would know the mean as well: p (1 - p) / SE², SE² = var(task means) / tasks.

        Between the number of tasks (samples of a task are all alike) and that of episodes (they are independent).
        """
        mean = self.mean
        if mean is None:
            return 0.0
        variance = max(self.squares / self.num_tasks - mean * mean, 0.0)
        spread = mean * (1.0 - mean)
        if spread <= 0.0:
            return float(self.num_tasks)
        most = float(max(self.num_episodes, self.num_tasks))
        return most if variance <= 0.0 else min(max(spread / variance, 1.0) * self.num_tasks, most)

    @property
    def interval(self) -> Interval | None:
        """Of the mean over all tasks that these were drawn from."""
        mean = self.mean
        return None if mean is None else wilson(mean, self.effective_size)


def wilson(share: float, size: float) -> Interval:
    """Score interval of a share of `size` independent samples, which need not be a whole number."""
    z2 = _Z * _Z
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = _Z / (1 + z2 / size) * math.sqrt(share * (1 - share) / size + z2 / (4 * size * size))
    return Interval(max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that one of k samples passes, without bias: 1 - C(n - c, k) / C(n, k), as a product that cannot overflow.

    Raises: ValueError: fewer samples than k know nothing of it.
    Source: Chen et al. 2021, arXiv:2107.03374, section 2.1 and figure 3.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passed among {num_samples} samples is not defined")
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_passed + 1, num_samples + 1))


def ks_of(num_samples: int) -> list[int]:
    """The k of pass@k that are shown: powers of two, and the number of samples."""
    return sorted({2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples} | {num_samples})


def paired_difference(first: Sequence[tuple[float, int]], second: Sequence[tuple[float, int]]) -> Difference:
    """Of the means of two sides on the same tasks in the same order: (share, episodes) of each task.

    Wilson's limits of both, put together by squares with their correlation r over tasks: with a, b the distances from
    a mean to the limit that counts, d ± √(a² - 2 r a b + b²). What is hard for both sides cancels out.
    Source: Newcombe 1998, Statistics in Medicine 17, 2635-2650 (pairs, without his continuity correction); Zou 2007
    for estimates that are not proportions of single trials.
    Raises: ValueError: no tasks, or another number of them on each side.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"tasks={len(first)} and {len(second)} are no pairs")
    sides = []
    for side in (first, second):
        means = TaskMeans()
        for share, num_episodes in side:
            means.add(share, num_episodes)
        sides.append(means)
    one, other = (m.total / m.num_tasks for m in sides)
    (low_1, high_1), (low_2, high_2) = (wilson(m.total / m.num_tasks, m.effective_size) for m in sides)
    r = _correlation([share for share, _ in first], [share for share, _ in second])
    mean = other - one
    below = _joined(other - low_2, high_1 - one, r)
    above = _joined(high_2 - other, one - low_1, r)
    return Difference(mean, max(mean - below, -1.0), min(mean + above, 1.0))


def _joined(a: float, b: float, r: float) -> float:
    return math.sqrt(max(a * a - 2 * r * a * b + b * b, 0.0))


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; 0 where one side does not vary, which claims nothing."""
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    xy = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    xx, yy = math.fsum((x - mean_x) ** 2 for x in xs), math.fsum((y - mean_y) ** 2 for y in ys)
    return max(-1.0, min(1.0, xy / math.sqrt(xx * yy))) if xx > 1e-18 and yy > 1e-18 else 0.0
