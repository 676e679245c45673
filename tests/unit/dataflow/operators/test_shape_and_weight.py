"""Operators that change rewards, and operators that weigh groups."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.contracts import Operator
from astraflow.dataflow.operators.shape.overlong_penalty import OverlongPenalty
from astraflow.dataflow.operators.shape.rewards import RewardClip, RewardNormalize, RewardScale
from astraflow.dataflow.operators.weight.balance import Balance
from astraflow.dataflow.operators.weight.staleness_weight import StalenessWeight
from astraflow.errors import DataflowError
from astraflow.testing.operators import chain, check_operator, group
from astraflow.types import Group


def rewards(operator: Operator, one: Group) -> list[float | None]:
    result = operator.on_group(one)
    assert isinstance(result, Group)
    return result.rewards


def test_reward_clip_bounds_rewards_and_leaves_unscored_ones() -> None:
    assert rewards(RewardClip(low=-1, high=2), group([-3.0, 0.5, 9.0, None])) == [-1, 0.5, 2, None]


def test_reward_scale_scales_episodes_and_calls() -> None:
    one = group([1.0, None], rewards_per_call=[(1.0, 2.0), ()])
    assert rewards(RewardScale(factor=0.5, offset=1.0), one) == [1.5, None]
    assert one.rewards_per_call == [(0.5, 1.0), ()]


def test_reward_normalize_goes_by_all_rewards_of_the_source_so_far() -> None:
    operator = RewardNormalize(eps=1e-12)
    assert rewards(operator, group([0.0, 2.0])) == pytest.approx([-1.0, 1.0])
    # mean 2, std sqrt(2) over 0, 2, 2, 4
    half = 2**0.5
    assert rewards(operator, group([2.0, 4.0, None], row=1)) == [0.0, pytest.approx(half), None]
    assert rewards(operator, group([100.0, 300.0], source="other")) == pytest.approx([-1.0, 1.0])


@settings(max_examples=30)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_reward_normalize_is_the_usual_normalisation(values: list[float]) -> None:
    operator = RewardNormalize(clip=0.0, eps=1e-9)
    result = rewards(operator, group(values))
    std = statistics.pstdev(values)
    if std > 1e-3:
        mean = statistics.fmean(values)
        assert result == pytest.approx([(v - mean) / std for v in values], rel=1e-4, abs=1e-4)


def test_reward_normalize_only_divides_when_it_does_not_center_and_is_bounded() -> None:
    assert rewards(RewardNormalize(center=False, eps=1e-12), group([0.0, 2.0])) == pytest.approx([0.0, 2.0])
    assert rewards(RewardNormalize(clip=0.5), group([0.0, 2.0])) == [-0.5, 0.5]
    assert rewards(RewardNormalize(), group([3.0, 3.0])) == [0.0, 0.0]


def test_overlong_penalty_by_hand() -> None:
    """DAPO equation 13 with L_max 10 and L_cache 4: none up to 6, then a quarter per token, -1 from 10 on."""
    one = group([1.0] * 5 + [None], num_tokens=[5, 6, 7, 10, 12, 12])
    assert rewards(OverlongPenalty(max_tokens=10, buffer_tokens=4), one) == [1.0, 1.0, 0.75, 0.0, 0.0, None]
    assert rewards(OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=2), group([0.0], num_tokens=[8])) == [-1.0]


def batch(*groups: tuple[str, Sequence[int]]) -> list[Group]:
    """Groups of (source, sampled tokens of each episode), credited."""
    return [
        group([0.0] * len(n), row=i, source=source, num_tokens=list(n), advantages=[0.0] * len(n))
        for i, (source, n) in enumerate(groups)
    ]


def weights(operator: Operator, groups: list[Group], step: int = 1) -> list[float]:
    chain(operator).on_batch(groups, step)
    return [g.weight for g in groups]


def test_balance_gives_a_source_its_share_of_groups_whatever_its_length() -> None:
    """Two groups of 10 tokens and two of 30: halves of 80 tokens are 40 each, so 40/20 = 2 and 40/60 = 2/3."""
    groups = batch(("short", [5, 5]), ("short", [10]), ("long", [30]), ("long", [10, 20]))
    assert weights(Balance(), groups) == pytest.approx([2, 2, 2 / 3, 2 / 3])


def test_balance_may_give_each_source_the_same_share() -> None:
    groups = batch(("a", [10]), ("a", [10]), ("a", [10]), ("b", [30]))
    assert weights(Balance(share="sources"), groups) == pytest.approx([1, 1, 1, 1])
    groups = batch(("a", [10]), ("a", [10]), ("a", [10]), ("b", [30]))
    assert weights(Balance(by="groups", share="sources"), groups) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2])


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 500), min_size=1, max_size=4)), min_size=1, max_size=9
    ),
    st.sampled_from([Balance(), Balance(share="sources"), Balance(smooth=0.8)]),
)
def test_balanced_weights_average_to_one_over_the_tokens(spec: list[tuple[str, list[int]]], balance: Balance) -> None:
    groups = batch(*spec)
    weighted = sum(w * sum(n) for w, (_, n) in zip(weights(balance, groups), spec, strict=True))
    assert weighted == pytest.approx(sum(sum(n) for _, n in spec))


def test_balance_smooths_the_length_of_a_source_over_batches() -> None:
    balance = Balance(smooth=0.75)
    weights(balance, batch(("a", [10]), ("b", [10])))
    # b now has 30, its moving mean 15: 1/10 and 1/15 of 40 tokens, scaled so that 10 w_a + 30 w_b = 40
    assert weights(balance, batch(("a", [10]), ("b", [30]))) == pytest.approx([4 / 3, 8 / 9])


def test_weights_multiply() -> None:
    groups = batch(("a", [10]), ("b", [30]))
    for g in groups:
        g.weight = 3.0
    assert weights(Balance(), groups) == pytest.approx([6, 2])


def test_staleness_weight_falls_with_the_age_of_the_oldest_token() -> None:
    groups = batch(("a", [1, 1]), ("a", [1]), ("a", [1]))
    groups[0].min_version, groups[1].min_version, groups[2].min_version = [4, 3], [2], [-1]
    assert weights(StalenessWeight(decay=0.5), groups, step=5) == [0.5, 0.25, 1.0]
    groups = batch(("a", [1]))
    assert weights(StalenessWeight(decay=0.5, floor=0.2), groups, step=10) == [0.2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RewardClip(low=1, high=1), "reward_clip.low=1 must be < high (1)"),
        (lambda: RewardScale(factor=float("nan")), "reward_scale.factor=nan must be finite"),
        (lambda: RewardNormalize(eps=0), "reward_normalize.eps=0 must be > 0"),
        (lambda: OverlongPenalty(max_tokens=10, buffer_tokens=11), "must be 1 to max_tokens (10)"),
        (lambda: Balance(by="groups"), "balance.by=groups changes nothing with share = 'groups'"),
        (lambda: Balance(by="words"), "balance.by=words must be tokens or groups"),  # type: ignore[arg-type]
        (lambda: Balance(smooth=1.0), "balance.smooth=1.0 must be >= 0 and < 1"),
        (lambda: StalenessWeight(decay=0), "staleness_weight.decay=0 must be > 0 and <= 1"),
    ],
)
def test_options_are_checked(make: Callable[[], Operator], said: str) -> None:
    with pytest.raises(DataflowError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        RewardClip,
        RewardScale,
        RewardNormalize,
        lambda: OverlongPenalty(max_tokens=4, buffer_tokens=2),
        Balance,
        lambda: Balance(smooth=0.9),
        StalenessWeight,
    ],
)
def test_they_keep_the_contract(make: Callable[[], Operator]) -> None:
    check_operator(make, [group([1.0, 0.0, None]), group([0.5, 0.7], row=1, source="other"), group([9.0, 0.0], row=2)])
