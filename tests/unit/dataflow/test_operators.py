"""Operators and advantages: degenerate groups, contract breaches."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.operators.chain import Chain, chain_of
from astraflow.dataflow.operators.credit.relative import Grpo, group_advantages
from astraflow.dataflow.operators.filters.keep_all import KeepAll
from astraflow.dataflow.operators.filters.zero_variance import ZeroVariance
from astraflow.errors import DataflowError
from astraflow.testing.dataflow import small_config
from astraflow.types import Group, Task


def group(rewards: list[float | None]) -> Group:
    n = len(rewards)
    return Group(
        group_id="train/0/0",
        policy="actor",
        task=Task("train", 0, 0, {}),
        episode_ids=[f"train/0/0/{k}" for k in range(n)],
        rewards=rewards,
        rewards_per_call=[()] * n,
        metrics=[{}] * n,
        num_tokens=[3] * n,
        num_truncated=[0] * n,
        num_calls=[1] * n,
        min_version=[0] * n,
        errors=[None] * n,
    )


@pytest.mark.parametrize(
    "rewards",
    [[1.0, 0.0, 0.0, 0.0], [0.35] + [0.4] * 7, [0.1] * 3, [1.0, math.nan, 0.0], [1.0, None, 0.0], [1.0], [None], []],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_degenerate_groups_give_finite_bounded_advantages(rewards: list[float | None], normalize: bool) -> None:
    advantages = group_advantages(rewards, normalize=normalize)
    assert len(advantages) == len(rewards)
    assert all(math.isfinite(a) and abs(a) < 10 for a in advantages)


def test_a_group_of_two_is_plus_and_minus_one() -> None:
    assert group_advantages([1.0, 0.0, None]) == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_groups_are_exactly_zero(reward: float, size: int) -> None:
    assert group_advantages([reward] * size) == [0.0] * size


@given(st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(-10, 10)), min_size=1, max_size=12))
def test_unscored_members_take_no_part(rewards: list[float | None]) -> None:
    scored = [r for r in rewards if r is not None and math.isfinite(r)]
    advantages = group_advantages(rewards)
    rest = [a for a, r in zip(advantages, rewards, strict=True) if r is not None and math.isfinite(r)]
    assert rest == group_advantages(scored)
    assert [a for a, r in zip(advantages, rewards, strict=True) if r is None or not math.isfinite(r)] == [0.0] * (
        len(rewards) - len(scored)
    )


def test_without_normalisation_the_advantage_is_the_distance_from_the_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.5], normalize=False) == pytest.approx([0.5, -0.5, 0.0])


def test_zero_variance_drops_equal_groups_and_ignores_unscored_members() -> None:
    assert ZeroVariance().on_group(group([0.5, 0.5, None])) == "zero_variance"
    assert isinstance(ZeroVariance().on_group(group([0.5, 0.4])), Group)


def test_keep_all_keeps_equal_groups() -> None:
    assert isinstance(KeepAll().on_group(group([0.5, 0.5])), Group)


class First(KeepAll):
    """Keeps only the first two siblings."""

    def on_group(self, group: Group) -> Group | str:
        group.episode_ids, group.rewards = group.episode_ids[:2], group.rewards[:2]
        return group


class Wrong(KeepAll):
    """Breaks its contract."""

    def __init__(self, result: object) -> None:
        self.result = result

    def on_group(self, group: Group) -> Group | str:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result  # type: ignore[return-value]


def test_an_operator_that_loses_episodes_is_an_error_with_advice() -> None:
    with pytest.raises(DataflowError, match="each once and in order; set the reward of an episode to None"):
        Chain("policies.actor", [First()], Grpo()).on_group(group([1.0, 0.0, 5.0]))


@pytest.mark.parametrize("result", [None, 3, ValueError("boom")])
def test_an_operator_that_breaks_its_contract_is_an_error_that_names_it(result: object) -> None:
    with pytest.raises(DataflowError, match=r"policies\.actor Wrong"):
        Chain("policies.actor", [Wrong(result)], Grpo()).on_group(group([1.0, 0.0]))


def test_advantages_that_are_not_finite_are_refused() -> None:
    bad = group([1.0, 0.0])
    bad.advantages = [math.inf, 0.0]
    with pytest.raises(DataflowError, match="must not be set in phase filter"):
        Chain("policies.actor", [KeepAll()], Grpo()).on_group(bad)


def test_the_run_file_builds_the_chain() -> None:
    changes = {"policies__actor__operators": ["keep_all"]}
    chain = chain_of("actor", small_config(**changes).policies["actor"])
    result = chain.on_group(group([1.0, 1.0]))
    assert isinstance(result, Group) and result.advantages == [0.0, 0.0]
    assert chain.state_dicts() == [{}, {}]
