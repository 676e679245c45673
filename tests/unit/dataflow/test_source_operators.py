"""Operators of a source, one by one: what they admit, what they learn, and that their state is all they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.contracts import Operator
from astraflow.dataflow.operators.source.accept_all import AcceptAll
from astraflow.dataflow.operators.source.curriculum import Curriculum
from astraflow.dataflow.operators.source.filter_solved import FilterSolved
from astraflow.dataflow.operators.source.greso import Greso
from astraflow.dataflow.operators.source.throttle import Throttle
from astraflow.errors import DataflowError
from astraflow.types import Group, SourceView, Task

VIEW = SourceView(step=0, in_flight=0, admitted=0)


def task(row: int = 0, epoch: int = 0, **fields: Any) -> Task:
    return Task("train", row, epoch, fields)


def group(
    rewards: Sequence[float | None],
    of: Task | None = None,
    *,
    policy: str = "actor",
    success: Sequence[float] | None = None,
) -> Group:
    of, size = of or task(), len(rewards)
    return Group(
        group_id=of.group_id,
        policy=policy,
        task=of,
        episode_ids=[f"{of.group_id}/{k}" for k in range(size)],
        rewards=list(rewards),
        rewards_per_call=[()] * size,
        metrics=[{"success": s} for s in success] if success else [{}] * size,
        num_tokens=[3] * size,
        min_version=[0] * size,
        errors=[None] * size,
    )


def again(operator: Operator, fresh: Operator) -> Operator:
    """A fresh operator with the state of another, as a snapshot carries it."""
    state = json.dumps(operator.state_dict())
    fresh.load_state_dict(json.loads(state))
    assert json.dumps(fresh.state_dict()) == state
    return fresh


def test_accept_all_accepts() -> None:
    assert AcceptAll().admit(task(), VIEW) == 1.0


def test_filter_solved_skips_what_is_solved_after_enough_visits() -> None:
    operator = FilterSolved(above=0.9, min_visits=2, revisit=0.1, memory=0.5)
    operator.on_result(group([1.0, 1.0]))
    assert operator.admit(task(), VIEW) == 1.0
    operator.on_result(group([1.0, 1.0]))
    assert operator.admit(task(), VIEW) == 0.1
    assert operator.admit(task(1), VIEW) == 1.0
    operator = again(operator, FilterSolved(above=0.9, min_visits=2, revisit=0.1, memory=0.5))
    assert operator.admit(task(epoch=5), VIEW) == 0.1
    operator.on_result(group([0.0, 1.0]))  # 0.5 * 1 + 0.5 * 0.5
    assert operator.admit(task(), VIEW) == 1.0
    assert operator.state_dict() == {"actor": {"rows": [0], "visits": [2], "rates": [0.75]}}


def test_filter_solved_keeps_hopeless_rows_unless_below_is_given() -> None:
    for below, expected in ((None, 1.0), (0.0, 0.05)):
        operator = FilterSolved(below=below, min_visits=1)
        operator.on_result(group([0.0, 0.5]))
        assert operator.admit(task(), VIEW) == expected


def test_filter_solved_goes_by_the_metric_before_the_reward_and_forgets_failed_groups() -> None:
    operator = FilterSolved(min_visits=1)
    operator.on_result(group([None, None]))
    operator.on_result(group([float("nan"), None]))
    assert operator.state_dict() == {}
    operator.on_result(group([1.0, 1.0], success=[0.0, 0.0]))
    assert operator.admit(task(), VIEW) == 1.0
    operator = FilterSolved(min_visits=1, threshold=0.4)
    operator.on_result(group([0.5, 0.5]))
    assert operator.admit(task(), VIEW) == 0.05


def test_filter_solved_skips_for_all_policies_or_not_at_all() -> None:
    operator = FilterSolved(min_visits=1)
    operator.on_result(group([1.0, 1.0], policy="actor"))
    operator.on_result(group([0.0, 1.0], policy="verifier"))
    assert operator.admit(task(), VIEW) == 1.0
    operator = FilterSolved(min_visits=1)
    for policy in ("actor", "verifier"):
        operator.on_result(group([1.0, 1.0], policy=policy))
    assert operator.admit(task(), VIEW) == 0.05


def test_greso_lowers_the_probability_with_each_group_of_equal_rewards() -> None:
    operator = Greso(p_easy=0.5, p_hard=0.8, floor_easy=0.1, floor_hard=0.0)
    assert operator.admit(task(), VIEW) == 1.0
    for expected in (0.5, 0.25, 0.125, 0.1, 0.1):
        operator.on_result(group([1.0, 1.0, 1.0]))
        assert operator.admit(task(), VIEW) == expected
    for z in range(1, 4):
        operator.on_result(group([0.0, 0.0], task(1)))
        assert operator.admit(task(1), VIEW) == pytest.approx(0.8**z)
    operator.on_result(group([0.0, 1.0]))
    assert operator.admit(task(), VIEW) == 1.0
    operator.on_result(group([0.0, 0.0], task(2)))
    operator.on_result(group([1.0, 1.0], task(2)))  # the kind is that of the last group, the run goes on
    assert operator.admit(task(2), VIEW) == 0.25


def test_greso_calls_easy_what_is_above_its_bound() -> None:
    operator = Greso(p_easy=0.5, p_hard=0.8, floor_hard=0.0, easy_above=0.5)
    operator.on_result(group([0.5, 0.5]))
    assert operator.admit(task(), VIEW) == 0.8
    operator.on_result(group([0.75, 0.75], task(1)))
    assert operator.admit(task(1), VIEW) == 0.5


def test_greso_does_not_skip_what_differs_by_its_calls() -> None:
    operator, one = Greso(), group([1.0, 1.0, None])
    one.rewards_per_call = [(0.0, 1.0), (1.0, 0.0), ()]
    operator.on_result(one)
    assert operator.admit(task(), VIEW) == 1.0
    one.rewards_per_call = [(0.0, 1.0), (0.0, 1.0), ()]
    operator.on_result(one)
    assert operator.admit(task(), VIEW) == 0.5


def test_greso_takes_no_part_in_groups_without_two_scored_episodes() -> None:
    operator = Greso()
    operator.on_result(group([None, 1.0]))
    assert operator.state_dict()["runs"] == {} and operator.state_dict()["num_groups"] == 0


def test_greso_adapts_once_per_version_towards_its_targets_after_the_warm_up() -> None:
    operator = Greso(target_easy=0.25, target_hard=0.5, delta=0.02)

    def see(easy: int, hard: int, mixed: int, step: int, epoch: int) -> dict[str, float]:
        for row in range(easy):
            operator.on_result(group([1.0, 1.0], task(row)))
        for row in range(hard):
            operator.on_result(group([0.0, 0.0], task(100 + row)))
        for row in range(mixed):
            operator.on_result(group([0.0, 1.0], task(200 + row)))
        for _ in range(2):  # the second time nothing more happens
            operator.admit(task(9, epoch), SourceView(step, 0, 0))
        return dict(operator.state_dict()["p"])

    assert see(4, 0, 4, step=1, epoch=0) == {"easy": 0.5, "hard": 0.5}, "the first epoch is warm-up"
    assert see(2, 3, 3, step=2, epoch=1) == pytest.approx({"easy": 0.48, "hard": 0.52})  # 2/8 >= 1/4, 3/8 < 1/2
    assert see(1, 4, 3, step=3, epoch=1) == pytest.approx({"easy": 0.50, "hard": 0.50})
    assert see(0, 0, 0, step=4, epoch=1) == pytest.approx({"easy": 0.50, "hard": 0.50}), "nothing was seen"
    for step in range(5, 60):
        last = see(8, 0, 0, step, epoch=2)
    assert last == pytest.approx({"easy": 0.01, "hard": 0.99})


def test_greso_state_survives_a_snapshot() -> None:
    operator = Greso()
    for row in range(5):
        operator.on_result(group([float(row % 2)] * 2, task(row)))
        operator.on_result(group([0.0, 1.0], task(row), policy="verifier"))
    operator.admit(task(0, 1), SourceView(3, 0, 0))
    operator.on_result(group([1.0, 1.0], task(7)))
    other = again(operator, Greso())
    for row in range(9):
        assert other.admit(task(row, 2), SourceView(4, 0, 0)) == operator.admit(task(row, 2), SourceView(4, 0, 0))
    assert other.admit(task(0), VIEW) == 1.0, "the verifier can still learn from it"


def test_a_curriculum_opens_the_next_pool_when_the_newest_is_mastered() -> None:
    def fresh() -> Curriculum:
        return Curriculum(by="level", levels=["easy", "mid", "hard"], promote_at=0.75, window=2, keep=0.25)

    operator: Operator = fresh()
    easy, mid, hard = (task(i, level=x) for i, x in enumerate(("easy", "mid", "hard")))

    def ask() -> list[object]:
        return [operator.admit(x, VIEW) for x in (easy, mid, hard)]

    assert ask() == [1.0, 0.0, 0.0]
    for rewards in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0]):  # means of 2: 0.5, 0.25
        operator.on_result(group(rewards, easy))
    operator = again(operator, fresh())
    assert ask() == [1.0, 0.0, 0.0]
    operator.on_result(group([1.0, 1.0], easy))  # 0.75
    assert ask() == [0.25, 1.0, 0.0]
    for _ in range(2):
        operator.on_result(group([1.0, 1.0], easy))  # an older pool says nothing
        operator.on_result(group([None, None], mid))  # nor does a failed group
    assert ask() == [0.25, 1.0, 0.0]
    for _ in range(5):
        operator.on_result(group([1.0, 1.0], mid))
    assert ask() == [0.25, 0.25, 1.0]
    for _ in range(5):
        operator.on_result(group([1.0, 1.0], hard))
    assert ask() == [0.25, 0.25, 1.0]
    assert operator.state_dict() == {"newest": 2, "recent": []}, "after the last pool nothing is kept"


def test_a_curriculum_by_edges_and_with_several_pools_at_the_start() -> None:
    operator = Curriculum(by="size", edges=[3, 10], start=2, keep=0.0)
    assert [operator.admit(task(size=x), VIEW) for x in (1, 2.5, 3, 9, 10, 99)] == [1, 1, 1, 1, 0, 0]
    for _ in range(32):
        operator.on_result(group([1.0, 1.0], task(size=2)))
    assert [operator.admit(task(size=x), VIEW) for x in (1, 3, 10)] == [0, 0, 1]


@pytest.mark.parametrize("value", ["other", None, 3])
def test_a_curriculum_names_the_row_that_belongs_to_no_pool(value: object) -> None:
    operator = Curriculum(by="level", levels=["easy"])
    with pytest.raises(DataflowError, match=r"sources\.train row 4 level=.* belongs to no pool of 'easy'"):
        operator.admit(task(4, level=value), VIEW)


def test_throttle_waits_at_its_bounds() -> None:
    operator = Throttle(in_flight=2)
    assert [operator.admit(task(), SourceView(0, n, n)) for n in (0, 1, 2, 3)] == [1.0, 1.0, "wait", "wait"]
    operator = Throttle(per_step=2)
    assert [operator.admit(task(), SourceView(0, 9, n)) for n in (0, 1, 2)] == [1.0, 1.0, "wait"]
    assert operator.admit(task(), SourceView(1, 9, 2)) == 1.0
    operator = again(operator, Throttle(per_step=2))  # type: ignore[assignment]
    assert [operator.admit(task(), SourceView(1, 9, n)) for n in (3, 4)] == [1.0, "wait"]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FilterSolved(above=0.0), "filter_solved.above"),
        (lambda: FilterSolved(below=0.95), "filter_solved.below"),
        (lambda: FilterSolved(min_visits=0), "filter_solved.min_visits"),
        (lambda: FilterSolved(revisit=1.0), "filter_solved.revisit"),
        (lambda: FilterSolved(memory=1.0), "filter_solved.memory"),
        (lambda: Greso(p_easy=0.0), "greso.p_easy"),
        (lambda: Greso(target_hard=1.5), "greso.target_hard"),
        (lambda: Greso(warmup_epochs=-1), "greso.warmup_epochs"),
        (lambda: Curriculum(by="x"), "curriculum.levels"),
        (lambda: Curriculum(by="x", levels=["a"], edges=[1.0]), "curriculum.levels"),
        (lambda: Curriculum(by="x", levels=["a", "a"]), "curriculum.levels"),
        (lambda: Curriculum(by="x", edges=[2.0, 1.0]), "curriculum.edges"),
        (lambda: Curriculum(by="x", levels=["a"], start=2), "curriculum.start"),
        (lambda: Curriculum(by="x", levels=["a"], promote_at=1.1), "curriculum.promote_at"),
        (lambda: Curriculum(by="x", levels=["a"], window=0), "curriculum.window"),
        (lambda: Curriculum(by="x", levels=["a"], keep=-1.0), "curriculum.keep"),
        (lambda: Throttle(), "throttle"),
        (lambda: Throttle(in_flight=-1), "throttle.in_flight"),
        (lambda: Throttle(per_step=-1, in_flight=5), "throttle.per_step"),
    ],
)
def test_a_wrong_option_is_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(DataflowError) as error:
        make()
    assert error.value.thing == named


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, None, float("nan")]), min_size=1, max_size=4)
RESULTS = st.lists(st.tuples(st.integers(0, 5), REWARDS, st.sampled_from(["actor", "verifier"])), max_size=30)
MAKERS = {
    "filter_solved": lambda: FilterSolved(below=0.1, min_visits=1),
    "greso": Greso,
    "curriculum": lambda: Curriculum(by="level", levels=[0, 1, 2], window=2, promote_at=0.5),
    "throttle": lambda: Throttle(per_step=3, in_flight=4),
    "accept_all": AcceptAll,
}


@pytest.mark.parametrize("name", list(MAKERS))
@given(results=RESULTS, at=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_the_state_is_all_there_is(name: str, results: list[Any], at: int) -> None:
    """An operator that went through a snapshot anywhere answers as one that did not, and within its contract."""
    whole: Operator = MAKERS[name]()
    cut: Operator = MAKERS[name]()
    for i, (row, rewards, policy) in enumerate(results):
        if i == at:
            cut = again(cut, MAKERS[name]())
        of, view = task(row, i // 6, level=row % 3), SourceView(i // 4, i % 5, i)
        answers = [operator.admit(of, view) for operator in (whole, cut)]
        assert answers[0] == answers[1]
        assert answers[0] == "wait" or 0.0 <= answers[0] <= 1.0
        for operator in (whole, cut):
            operator.on_result(group(rewards, of, policy=policy))
    assert json.dumps(whole.state_dict()) == json.dumps(cut.state_dict())
