"""Estimators of advantages: by-hand values, degenerate groups, invariants."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.config import rooms
from astraflow.contracts import Operator
from astraflow.dataflow.operators.credit.in_trainer import Distill, Gae
from astraflow.dataflow.operators.credit.per_call import PerCall
from astraflow.dataflow.operators.credit.reinforce_pp import ReinforcePp
from astraflow.dataflow.operators.credit.relative import DrGrpo, Grpo, Rloo
from astraflow.dataflow.operators.filters.zero_variance import ZeroVariance
from astraflow.errors import DataflowError
from astraflow.testing.operators import chain, check_operator, group
from astraflow.types import Group

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"normalize": False}),
    ("grpo", {"eps": 1e-12}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("leave_one_out", {}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"baseline": "group", "by": "tokens"}),
    ("reinforce_pp", {"over": "source"}),
    ("per_call", {}),
    ("per_call", {"gamma": 0.9, "normalize": True}),
    ("per_call", {"baseline": "group"}),
]
IN_TRAINER = {"gae", "distill"}  # make no advantages here
IDS = [f"{name} {options}" for name, options in SETTINGS]


def made(setting: tuple[str, dict[str, Any]]) -> Operator:
    operator: Operator = rooms.build("advantages", *setting, "here")
    return operator


def advantages(operator: Operator, *groups: Group) -> list[list[float]]:
    """Of a batch of these groups; per call as the mean of the calls."""
    own, results = chain(advantage=operator), []
    for one in groups:
        result = own.on_group(copy.deepcopy(one))
        assert isinstance(result, Group)
        results.append(result)
    own.on_batch(results, 1)
    return [
        g.advantages if g.advantages is not None else [sum(c) / max(len(c), 1) for c in g.call_advantages or ()]
        for g in results
    ]


def test_every_estimator_is_tested() -> None:
    assert {name for name, _ in SETTINGS} == set(rooms.ROOMS["advantages"]) - IN_TRAINER


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.35] + [0.4] * 7, [1.0, None, 0.0], [1.0], [None], []])
def test_degenerate_groups_give_finite_bounded_advantages(
    setting: tuple[str, dict[str, Any]], rewards: list[float | None]
) -> None:
    (result,) = advantages(made(setting), group(rewards))
    assert len(result) == len(rewards)
    assert all(math.isfinite(a) and abs(a) < 10 for a in result)
    assert all(a == 0 for a, r in zip(result, rewards, strict=True) if r is None)


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@settings(max_examples=20)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 9))
def test_equal_groups_are_exactly_zero(setting: tuple[str, dict[str, Any]], reward: float, size: int) -> None:
    assert advantages(made(setting), group([reward] * size)) == [[0.0] * size]


REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=12)


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@settings(max_examples=20)
@given(rewards=REWARDS)
def test_unscored_members_take_no_part(setting: tuple[str, dict[str, Any]], rewards: list[float | None]) -> None:
    (whole,) = advantages(made(setting), group(rewards))
    (scored,) = advantages(made(setting), group([r for r in rewards if r is not None]))
    assert [a for a, r in zip(whole, rewards, strict=True) if r is not None] == pytest.approx(scored, abs=1e-9)
    assert all(a == 0 for a, r in zip(whole, rewards, strict=True) if r is None)


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
@settings(max_examples=20)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_a_better_episode_never_gets_less(setting: tuple[str, dict[str, Any]], rewards: list[float]) -> None:
    (result,) = advantages(made(setting), group(rewards))
    assert all(math.isfinite(a) for a in result)
    order = np.argsort(rewards, kind="stable")
    ranked = np.array(result)[order]
    assert (np.diff(ranked) >= -1e-9).all()


def test_a_reward_that_is_not_a_number_is_refused_before_any_estimator() -> None:
    with pytest.raises(DataflowError, match="rewards must be finite"):
        chain(advantage=Grpo()).on_group(group([1.0, math.nan]))


@pytest.mark.parametrize(
    ("operator", "rewards", "expected"),
    [
        # mean 1/4, std sqrt(3)/4
        (Grpo(eps=1e-12), [1.0, 0.0, 0.0, 0.0], [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
        (Grpo(), [1.0, 0.0, None], [1.0, -1.0, 0.0]),
        (Grpo(normalize=False), [1.0, 0.0, 0.5], [0.5, -0.5, 0.0]),
        (DrGrpo(), [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        # 1 - 0, 0 - 1/3
        (Rloo(), [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (Rloo(), [1.0, 0.5, 0.0], [0.75, 0.0, -0.75]),
    ],
)
def test_group_relative_estimators_by_hand(
    operator: Operator, rewards: list[float | None], expected: list[float]
) -> None:
    assert advantages(operator, group(rewards))[0] == pytest.approx(expected, abs=1e-5)


@settings(max_examples=20)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_rloo_is_the_distance_from_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert advantages(Rloo(), group(rewards))[0] == pytest.approx(expected, abs=1e-9)


def test_reinforce_pp_normalises_over_the_batch_by_hand() -> None:
    groups = [group([1.0, 0.0]), group([1.0, 1.0], row=1)]  # mean 3/4, std sqrt(3)/4
    high, low = 1 / math.sqrt(3), -math.sqrt(3)
    assert advantages(ReinforcePp(eps=1e-12), *groups)[0] == pytest.approx([high, low])
    assert advantages(ReinforcePp(eps=1e-12), *groups)[1] == pytest.approx([high, high])


def test_reinforce_pp_with_group_baseline_by_hand() -> None:
    groups = [group([1.0, 0.0]), group([1.0, 1.0], row=1)]  # 1/2, -1/2, 0, 0: mean 0, std sqrt(1/8)
    result = advantages(ReinforcePp(baseline="group", eps=1e-12), *groups)
    assert result[0] == pytest.approx([math.sqrt(2), -math.sqrt(2)]) and result[1] == [0.0, 0.0]


def test_reinforce_pp_over_sources_knows_the_scale_of_each() -> None:
    groups = [group([1.0, 0.0]), group([100.0, 0.0], source="other"), group([1.0, 1.0], row=1)]
    high, low = 1 / math.sqrt(3), -math.sqrt(3)  # of train: mean 3/4, std sqrt(3)/4
    result = advantages(ReinforcePp(over="source", eps=1e-12), *groups)
    assert [pytest.approx(x) for x in result] == [[high, low], [1.0, -1.0], [high, high]]


def test_reinforce_pp_by_tokens_counts_long_episodes_more() -> None:
    one = group([1.0, 0.0], num_tokens=[1, 3])  # mean 1/4, std sqrt(3)/4
    assert advantages(ReinforcePp(by="tokens", eps=1e-12), one)[0] == pytest.approx([math.sqrt(3), -1 / math.sqrt(3)])


def test_reinforce_pp_has_mean_zero_and_std_one_over_a_batch() -> None:
    rewards = np.random.default_rng(0).normal(size=(6, 4))
    flat = np.array(advantages(ReinforcePp(), *(group(list(r), row=i) for i, r in enumerate(rewards)))).ravel()
    assert flat.mean() == pytest.approx(0, abs=1e-9) and flat.std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("make", [Grpo, ReinforcePp])
def test_rewards_that_differ_by_rounding_give_next_to_nothing(make: Callable[[], Operator]) -> None:
    (result,) = advantages(make(), group([0.1 + 0.2, 0.3, 0.3]))
    assert max(map(abs, result)) < 1e-9


def per_call(operator: PerCall, one: Group) -> list[tuple[float, ...]]:
    result = chain(advantage=operator).on_group(one)
    assert isinstance(result, Group) and result.call_advantages is not None
    return result.call_advantages


def test_per_call_credit_by_hand() -> None:
    """Returns with gamma 1/2: (0 + 1/2 * (1 + 1), 1 + 1) = (1, 2) and (1 + 1/2 * 0, 0 + 0) = (1, 0)."""
    one = group([1.0, 0.0], rewards_per_call=[(0.0, 1.0), (1.0, 0.0)], num_calls=[2, 2])
    assert per_call(PerCall(gamma=0.5), one) == [(0.0, 1.0), (0.0, -1.0)]


def test_without_rewards_per_call_the_outcome_is_discounted_back_to_each_call() -> None:
    one = group([1.0, 0.0], num_calls=[3, 1])
    result = per_call(PerCall(gamma=0.5, baseline="none"), one)
    assert result == [(0.25, 0.5, 1.0), (0.0,)]


def test_a_call_that_one_sibling_alone_made_gets_exactly_zero() -> None:
    one = group([1.0, 0.0], num_calls=[2, 1])
    assert per_call(PerCall(), one) == [(0.5, 0.0), (-0.5,)]


def test_a_baseline_of_the_group_is_over_all_calls() -> None:
    one = group([1.0, 0.0], num_calls=[2, 1])  # returns 1, 1 and 0: mean 2/3
    assert per_call(PerCall(baseline="group"), one) == [pytest.approx((1 / 3, 1 / 3)), pytest.approx((-2 / 3,))]


def test_per_call_normalised_is_a_number_of_standard_deviations() -> None:
    one = group([3.0, 0.0], num_calls=[1, 1])
    (((high,), (low,)),) = (per_call(PerCall(normalize=True, eps=1e-12), one),)
    assert [high, low] == pytest.approx([1.0, -1.0])


def test_the_outcome_may_count_less_or_not_at_all() -> None:
    one = group([1.0, 0.0], rewards_per_call=[(0.0, 0.0), (0.5, 0.0)], num_calls=[2, 2])
    assert per_call(PerCall(outcome=0.0), one) == [(-0.25, 0.0), (0.25, 0.0)]


def test_an_episode_without_calls_or_reward_has_no_credit() -> None:
    one = group([1.0, None, 0.0], num_calls=[1, 2, 1])
    assert per_call(PerCall(), one) == [(0.5,), (), (-0.5,)]


def test_gae_hands_the_rewards_of_calls_on() -> None:
    one = group([1.0, 0.5, None], rewards_per_call=[(0.0, 0.25), (), ()], num_calls=[2, 3, 1])
    result = chain(advantage=Gae(outcome=2.0)).on_group(one)
    assert isinstance(result, Group) and result.call_advantages == [(0.0, 2.25), (0.0, 0.0, 1.0), ()]


@pytest.mark.parametrize("make", [Gae, Distill])
def test_equal_siblings_are_kept_for_a_critic_or_a_teacher(make: Callable[[], Operator]) -> None:
    own = chain(ZeroVariance(), advantage=make())
    assert isinstance(own.on_group(group([1.0, 1.0])), Group)
    check_operator(make, [group([1.0, 0.0, None]), group([0.5], row=1)])


def test_for_a_teacher_rewards_are_no_credit() -> None:
    result = chain(advantage=Distill()).on_group(group([1.0, 0.5]))
    assert isinstance(result, Group) and result.advantages == [0.0, 0.0] and result.rewards == [1.0, 0.5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gae(outcome=-1.0), "gae.outcome=-1.0 must be >= 0"),
        (lambda: Grpo(eps=0.0), "grpo.eps=0.0 must be > 0"),
        (lambda: ReinforcePp(eps=0.0), "reinforce_pp.eps=0.0 must be > 0"),
        (lambda: PerCall(eps=0.0), "per_call.eps=0.0 must be > 0"),
        (lambda: ReinforcePp(over="all"), "reinforce_pp.over=all must be batch or source"),  # type: ignore[arg-type]
        (lambda: ReinforcePp(baseline="mean"), "reinforce_pp.baseline=mean must be none or group"),  # type: ignore[arg-type]
        (lambda: PerCall(gamma=1.5), "per_call.gamma=1.5 must be 0 to 1"),
        (lambda: PerCall(normalize=True, baseline="none"), "must be false without a baseline"),
    ],
)
def test_options_are_checked(make: Callable[[], Operator], said: str) -> None:
    with pytest.raises(DataflowError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
def test_estimators_keep_the_contract(setting: tuple[str, dict[str, Any]]) -> None:
    check_operator(lambda: made(setting), [group([1.0, 0.0, None]), group([0.5, 0.5], row=1)])
