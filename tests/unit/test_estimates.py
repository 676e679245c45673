"""Shares and their intervals, against values by hand, exact fractions and simulated tasks."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.estimates import TaskMeans, ks_of, paired_difference, pass_at_k, wilson


def means_of(rows: list[list[float]]) -> TaskMeans:
    made = TaskMeans()
    for row in rows:
        made.add(sum(row) / len(row), len(row))
    return made


def test_wilson_by_hand() -> None:
    # 8 of 10: (0.8 + 3.8415/20 ± 1.96 √(0.016 + 3.8415/400)) / 1.38415
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert wilson(1.0, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)


def test_one_sample_of_each_task_is_wilson_of_as_many() -> None:
    means = means_of([[1.0]] * 8 + [[0.0]] * 2)
    assert means.effective_size == pytest.approx(10)
    assert means.interval == pytest.approx(wilson(0.8, 10))


def test_samples_that_are_all_alike_say_no_more_than_one() -> None:
    alike, mixed = means_of([[1.0] * 4] * 5 + [[0.0] * 4] * 5), means_of([[1.0, 0.0]] * 10)
    assert alike.effective_size == pytest.approx(10)
    assert mixed.effective_size == pytest.approx(20)  # never more than there are episodes
    assert means_of([[1.0] * 4] * 10).interval == pytest.approx(wilson(1.0, 10))


def test_by_hand_between_both() -> None:
    # task means 1, 1/2, 0: p = 1/2, variance 1/6, p (1 - p) = 1/4: 1.5 effective samples a task
    assert means_of([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]).effective_size == pytest.approx(4.5)


def test_no_task_says_nothing() -> None:
    assert TaskMeans().mean is None and TaskMeans().interval is None


def test_a_share_beyond_its_ends_counts_as_the_end() -> None:
    means = means_of([[3.0], [-1.0]])
    assert means.mean == 0.5


def test_sums_survive_json() -> None:
    means = means_of([[1.0, 0.0], [1.0, 1.0]])
    assert msgspec.json.decode(msgspec.json.encode({2: means}), type=dict[int, TaskMeans]) == {2: means}


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), min_size=1, max_size=40))
def test_an_interval_holds_its_mean_and_stays_inside(rows: list[list[float]]) -> None:
    means = means_of(rows)
    mean, interval = means.mean, means.interval
    assert mean is not None and interval is not None
    assert 0.0 <= interval.low <= mean <= interval.high <= 1.0 and interval.high > interval.low
    assert len(rows) - 1e-6 <= means.effective_size <= sum(map(len, rows)) + 1e-6


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_subsets_of_k(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    exact = Fraction(sum(any(s) for s in subsets), len(subsets))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact))


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    n, c, k = 20_000, 3, 5_000
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_of_too_few_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


def test_which_k_are_shown() -> None:
    assert [ks_of(n) for n in (1, 2, 3, 8, 10)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


def test_a_difference_by_hand() -> None:
    # 6 of 10 and 8 of 10, the second passes whatever the first does: r = 0.2·0.6 / √(0.24·0.16) = 0.6124
    first = [(1.0, 1)] * 6 + [(0.0, 1)] * 4
    second = [(1.0, 1)] * 8 + [(0.0, 1)] * 2
    (l1, u1), (l2, u2) = wilson(0.6, 10), wilson(0.8, 10)
    r = 0.12 / math.sqrt(0.24 * 0.16)
    below = math.sqrt((0.8 - l2) ** 2 - 2 * r * (0.8 - l2) * (u1 - 0.6) + (u1 - 0.6) ** 2)
    above = math.sqrt((u2 - 0.8) ** 2 - 2 * r * (u2 - 0.8) * (0.6 - l1) + (0.6 - l1) ** 2)
    assert paired_difference(first, second) == pytest.approx((0.2, 0.2 - below, 0.2 + above))


def test_pairs_are_needed() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired_difference([(1.0, 1)], [])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_a_difference_turns_its_sign_with_its_sides(pairs: list[tuple[int, int]]) -> None:
    first, second = [(a / 4, 4) for a, _ in pairs], [(b / 4, 4) for _, b in pairs]
    forth, back = paired_difference(first, second), paired_difference(second, first)
    assert -1.0 <= forth.low <= forth.mean + 1e-12 and forth.mean - 1e-12 <= forth.high <= 1.0
    assert (back.mean, back.low, back.high) == pytest.approx((-forth.mean, -forth.high, -forth.low), abs=1e-9)


@pytest.mark.parametrize("spread", [0.3, 1.0, 8.0])
def test_intervals_hold_the_truth_as_often_as_they_say(spread: float) -> None:
    """Tasks of very different difficulty (beta of both ends `spread`), 4 samples each, 50 tasks, 600 evaluations."""
    rng = np.random.default_rng(7)
    held = paired = 0
    for _ in range(600):
        chances = rng.beta(0.7 * 2 * spread, 0.3 * 2 * spread, 50)
        sides = [rng.binomial(4, chances) / 4, rng.binomial(4, 0.8 * chances) / 4]
        low, high = means_of([[share] * 4 for share in sides[0]]).interval or (2.0, 2.0)
        held += low <= 0.7 <= high
        found = paired_difference([(s, 4) for s in sides[0].tolist()], [(s, 4) for s in sides[1].tolist()])
        paired += found.low <= -0.14 <= found.high
    assert 0.92 <= held / 600 <= 0.985 and 0.92 <= paired / 600 <= 0.985


def test_pairing_is_what_narrows_a_difference() -> None:
    shares = [(share, 4) for share in (0.0, 0.25, 0.5, 0.75, 1.0) * 8]
    better = [(min(share + 0.25, 1.0), 4) for share, _ in shares]
    together, apart = paired_difference(shares, better), paired_difference(shares, better[::-1])
    assert together.low > 0 > apart.low
