"""Operators of phase filter: what is left out of a group, what is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.contracts import Operator
from astraflow.dataflow.operators.credit.per_call import PerCall
from astraflow.dataflow.operators.credit.relative import Grpo
from astraflow.dataflow.operators.filters.dedup import Dedup
from astraflow.dataflow.operators.filters.keep_all import KeepAll
from astraflow.dataflow.operators.filters.length_filter import LengthFilter
from astraflow.dataflow.operators.filters.zero_variance import ZeroVariance
from astraflow.errors import DataflowError
from astraflow.testing.operators import chain, check_operator, group, tokens
from astraflow.types import Group, Task


def rewards(result: Group | str) -> Any:
    return result.rewards if isinstance(result, Group) else result


def test_zero_variance_drops_equal_groups_and_ignores_unscored_members() -> None:
    assert ZeroVariance().on_group(group([0.5, 0.5, None])) == "zero_variance"
    assert ZeroVariance().on_group(group([None, None])) == "zero_variance"
    assert rewards(ZeroVariance().on_group(group([0.5, 0.4]))) == [0.5, 0.4]


@pytest.mark.parametrize(
    ("estimator", "calls", "nums", "kept"),
    [
        (PerCall(), [(0.0, 1.0), (1.0, 0.0)], [2, 2], True),
        (PerCall(), [(0.0, 1.0), (0.0, 1.0)], [2, 2], False),
        (PerCall(), [(), ()], [1, 2], False),
        (PerCall(gamma=0.5), [(), ()], [1, 2], True),  # the outcome is discounted over other numbers of calls
        (PerCall(gamma=0.5, baseline="group"), [(), ()], [2, 2], True),
        (Grpo(), [(0.0, 1.0), (1.0, 0.0)], [2, 2], False),
    ],
)
def test_zero_variance_keeps_what_the_estimator_tells_apart_by_its_calls(
    estimator: Operator, calls: Any, nums: list[int], kept: bool
) -> None:
    one = group([1.0, 1.0, None], rewards_per_call=[*calls, (9.0,)], num_calls=[*nums, 1])
    result = chain(ZeroVariance(), advantage=estimator).on_group(one)
    assert isinstance(result, Group) == kept
    if isinstance(result, Group):
        assert result.call_advantages is not None and any(a for c in result.call_advantages for a in c)


def test_zero_variance_drops_almost_equal_groups_when_asked() -> None:
    assert ZeroVariance(min_std=0.05).on_group(group([0.5, 0.4])) == "zero_variance"
    assert rewards(ZeroVariance(min_std=0.04).on_group(group([0.5, 0.4]))) == [0.5, 0.4]


@pytest.mark.parametrize(("min_std", "kept"), [(0.04, True), (0.05, False), (0.2, False)])
@pytest.mark.parametrize("in_calls", [True, False])
def test_zero_variance_asks_the_estimator_for_more_than_almost_equal_calls(
    min_std: float, kept: bool, in_calls: bool
) -> None:
    one = group([0.5, 0.4])
    if in_calls:
        one = group([0.0, 0.0], rewards_per_call=[(0.5,), (0.4,)])
    result = chain(ZeroVariance(min_std=min_std), advantage=PerCall()).on_group(one)
    assert isinstance(result, Group) == kept


def test_keep_all_keeps_equal_groups() -> None:
    assert rewards(KeepAll().on_group(group([0.5, 0.5]))) == [0.5, 0.5]


def test_length_filter_leaves_out_what_is_too_short_or_too_long() -> None:
    one = group([1.0, 0.5, 0.25, 0.0], num_tokens=[1, 2, 5, 6])
    assert rewards(LengthFilter(min_tokens=2, max_tokens=5).on_group(one)) == [None, 0.5, 0.25, None]


def test_length_filter_has_no_upper_bound_unless_given() -> None:
    assert rewards(LengthFilter().on_group(group([1.0, 0.0], num_tokens=[1, 10**6]))) == [1.0, 0.0]


def test_length_filter_leaves_out_cut_episodes_only_when_asked() -> None:
    cut = {"num_truncated": [0, 1, 0]}
    assert rewards(LengthFilter().on_group(group([1.0, 0.5, 0.0], **cut))) == [1.0, 0.5, 0.0]
    assert rewards(LengthFilter(truncated=True).on_group(group([1.0, 0.5, 0.0], **cut))) == [1.0, None, 0.0]


def test_length_filter_drops_a_group_of_which_too_little_is_left() -> None:
    one = {"num_tokens": [1, 9, 9]}
    assert LengthFilter(max_tokens=5).on_group(group([1.0, 0.5, 0.0], **one)) == "length_filter"
    assert rewards(LengthFilter(max_tokens=5, min_episodes=1).on_group(group([1.0, 0.5, 0.0], **one))) == [
        1.0,
        None,
        None,
    ]


def answers(*ids: list[int], row: int = 0, fields: dict[str, Any] | None = None) -> Group:
    """A group whose episodes sampled these ids."""
    made = group([float(i) for i in range(len(ids))], row=row, tokens=[[tokens(i)] for i in ids])
    made.task = Task("train", row, 0, fields or {"question": f"q{row}"})
    return made


def test_dedup_counts_an_answer_once() -> None:
    assert rewards(Dedup().on_group(answers([1, 2], [3], [1, 2], [3, 4]))) == [0.0, 1.0, None, 3.0]


def test_dedup_compares_sampled_tokens_branch_by_branch() -> None:
    one = group(
        [0.0, 1.0, 2.0], tokens=[[tokens([9, 1], given=1)], [tokens([8, 1], given=1)], [tokens([1]), tokens([2])]]
    )
    assert rewards(Dedup().on_group(one)) == [0.0, None, 2.0]
    split = group([0.0, 1.0], tokens=[[tokens([1, 2])], [tokens([1]), tokens([2])]])
    assert rewards(Dedup().on_group(split)) == [0.0, 1.0]


def test_dedup_drops_a_group_of_copies() -> None:
    assert Dedup().on_group(answers([1], [1], [1])) == "dedup"
    assert rewards(Dedup(min_episodes=1).on_group(answers([1], [1], [1]))) == [0.0, None, None]


def test_dedup_ignores_unscored_episodes() -> None:
    one = answers([1], [1], [2])
    one.rewards[0] = None
    assert rewards(Dedup().on_group(one)) == [None, 1.0, 2.0]


def test_dedup_remembers_answers_to_the_same_task_for_a_window_of_groups() -> None:
    same = {"question": "twice in the file"}
    dedup = Dedup(window=2, min_episodes=1)
    assert rewards(dedup.on_group(answers([1], [2], row=0, fields=same))) == [0.0, 1.0]
    assert rewards(dedup.on_group(answers([1], [2], row=1))) == [0.0, 1.0]  # another task
    assert rewards(dedup.on_group(answers([2], [3], row=2, fields=same))) == [None, 1.0]
    assert rewards(dedup.on_group(answers([1], row=3, fields=same))) == [0.0]  # the window is past


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12), st.integers(1, 3), st.data()
)
def test_the_memory_of_dedup_is_bounded_and_goes_through_its_state(
    rows: list[list[int]], window: int, data: st.DataObject
) -> None:
    straight, resumed = Dedup(window=window, min_episodes=1), Dedup(window=window, min_episodes=1)
    for i, row in enumerate(rows):
        fields = {"question": data.draw(st.integers(0, 1))}
        given = [answers(*([x] for x in row), row=i, fields=fields) for _ in range(2)]
        assert rewards(straight.on_group(given[0])) == rewards(resumed.on_group(given[1]))
        assert len(straight.state_dict()["recent"]) <= window
        state = resumed.state_dict()
        resumed = Dedup(window=window, min_episodes=1)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state == straight.state_dict()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ZeroVariance(min_std=-1), "zero_variance.min_std=-1 must be >= 0"),
        (lambda: LengthFilter(min_tokens=5, max_tokens=4), "length_filter.max_tokens=4 must be >= min_tokens (5)"),
        (lambda: LengthFilter(min_episodes=0), "length_filter.min_episodes=0 must be >= 1"),
        (lambda: Dedup(window=-1), "dedup.window=-1 must be 0 to 100000"),
    ],
)
def test_options_are_checked(make: Callable[[], Operator], said: str) -> None:
    with pytest.raises(DataflowError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize("make", [KeepAll, ZeroVariance, LengthFilter, Dedup, lambda: Dedup(window=2)])
def test_filters_keep_the_contract(make: Callable[[], Operator]) -> None:
    check_operator(make, [answers([1], [2], row=0), answers([1], [1], [3], row=1), answers([5], [6], row=0)])
