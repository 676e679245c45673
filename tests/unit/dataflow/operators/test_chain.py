"""The hooks of a policy's operators: their order, and every breach of their contract by name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.contracts import Operator
from astraflow.dataflow.operators.chain import chain_of
from astraflow.errors import ConfigError, DataflowError
from astraflow.testing.dataflow import small_config
from astraflow.testing.operators import chain, group, tokens
from astraflow.types import Group


class Doing(Operator):
    """Does `what` to a group in the given phase."""

    def __init__(self, what: Callable[[Group], Any], phase: Any = "filter") -> None:
        self.what = what
        self.phase = phase  # type: ignore[misc]

    def on_group(self, group: Group) -> Group | str:
        result: Group | str = self.what(group)
        return result


class OnBatch(Operator):
    """Does `what` to the groups of a batch."""

    phase = "weight"

    def __init__(self, what: Callable[[Sequence[Group]], Any]) -> None:
        self.what = what

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        self.what(groups)


def changed(**fields: Any) -> Callable[[Group], Group]:
    return lambda group: msgspec.structs.replace(group, **fields)


def test_operators_run_by_phase_with_advantages_between_shape_and_weight() -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[[Group], Group]:
        def on(group: Group) -> Group:
            seen.append(f"{name} {'with' if group.advantages is not None else 'without'} advantages")
            return group

        return on

    own = chain(Doing(note("filter")), Doing(note("shape"), "shape"), Doing(note("weight"), "weight"))
    assert isinstance(own.on_group(group([1.0, 0.0])), Group)
    assert seen == ["filter without advantages", "shape without advantages", "weight with advantages"]


def test_an_operator_that_drops_ends_the_chain() -> None:
    own = chain(Doing(lambda g: "too_easy"), Doing(lambda g: 1 / 0, "shape"))
    assert own.on_group(group([1.0, 0.0])) == "too_easy"


BREACHES: dict[str, tuple[Callable[[Group], Any], str]] = {
    "raises": (lambda g: {}["x"], "KeyError: 'x' failed on group train/0/0"),
    "nothing": (lambda g: None, "must give a Group, or the reason"),
    "a list": (lambda g: [g], "must give a Group, or the reason"),
    "a sentence": (lambda g: "Too easy, 3 of 4", "for a reason like 'too_short'"),
    "no reason": (lambda g: "", "for a reason like 'too_short'"),
    "another group": (changed(group_id="train/0/9"), "must stay as it is"),
    "another policy": (changed(policy="verifier"), "must stay as it is"),
    "lost": (changed(episode_ids=["train/0/0/0"], rewards=[1.0]), "each once and in order"),
    "doubled": (changed(episode_ids=["train/0/0/0"] * 2), "each once and in order"),
    "swapped": (changed(episode_ids=["train/0/0/1", "train/0/0/0"]), "each once and in order"),
    "rewards": (changed(rewards=[1.0]), "rewards must be 2"),
    "num_tokens": (changed(num_tokens=[1, 1]), "=num_tokens must stay as it is"),
    "num_calls": (changed(num_calls=[]), "=num_calls must stay as it is"),
    "min_version": (changed(min_version=[9, 9]), "=min_version must stay as it is"),
    "errors": (changed(errors=["x", "x"]), "=errors must stay as it is"),
    "rewards no list": (changed(rewards=None), "TypeError"),
    "ids no list": (changed(episode_ids=None), "each once and in order"),
    "metrics no list": (changed(metrics=5), "=metrics must stay as it is"),
    "calls no list": (changed(rewards_per_call=[1.0, 2.0]), "TypeError"),
    "calls too few": (changed(rewards_per_call=[()]), "rewards_per_call must be 2"),
    "leaves": (lambda g: sys.exit(3), "SystemExit: 3 failed on group"),
    "nan reward": (changed(rewards=[1.0, math.nan]), "rewards must be finite"),
    "text reward": (changed(rewards=[1.0, "high"]), "rewards must be finite"),
    "negative weight": (changed(weight=-0.5), "weight must be >= 0"),
    "large reward": (changed(rewards=[1.0, 10**400]), "rewards must be finite"),
    "large weight": (changed(weight=1e39), "weight must be finite"),
    "nan weight": (changed(weight=math.nan), "weight must be finite"),
    "rewards of calls of another length": (changed(rewards_per_call=[(), (1.0, 2.0)]), "rewards_per_call must be 1"),
    "rewards of calls of another group": (
        changed(rewards_per_call=[()]),
        "rewards_per_call must be 2, one per episode",
    ),
    "early advantages": (changed(advantages=[1.0, 0.0]), "must not be set in phase filter"),
}


@pytest.mark.parametrize(("what", "said"), BREACHES.values(), ids=BREACHES)
def test_a_breach_of_the_contract_is_an_error_that_names_operator_and_group(
    what: Callable[[Group], Any], said: str
) -> None:
    with pytest.raises(DataflowError) as caught:
        chain(Doing(what)).on_group(group([1.0, 0.0]))
    assert said in str(caught.value) and str(caught.value).count("policies.actor Doing") == 1
    assert "train/0/0" in str(caught.value)


CREDIT_BREACHES: dict[str, tuple[Callable[[Group], Any], str]] = {
    "none": (lambda g: g, "must set advantages or call_advantages"),
    "too few": (changed(advantages=[1.0]), "advantages must be 2"),
    "nan": (changed(advantages=[1.0, math.nan]), "advantages must be finite"),
    "not float32": (changed(advantages=[1.0, -3.5e38]), "advantages must be finite"),
    "inf": (changed(advantages=[1.0, -math.inf]), "advantages must be finite"),
    "calls of too few": (changed(call_advantages=[(1.0,)]), "call_advantages must be 2 tuples"),
    "too few calls": (changed(call_advantages=[(1.0,), (0.5,)]), "must be 2, one per call"),
    "too many calls": (changed(call_advantages=[(1.0,) * 3, (0.5,) * 2]), "must be 2, one per call"),
    "no list": (changed(advantages=3.0), "TypeError"),
    "calls of none": (changed(call_advantages=[None, None]), "TypeError"),
    "nan call": (changed(call_advantages=[(1.0, 0.0), (math.nan, 0.0)]), "call_advantages must be finite"),
}


@pytest.mark.parametrize(("what", "said"), CREDIT_BREACHES.values(), ids=CREDIT_BREACHES)
def test_credit_must_be_one_finite_number_for_each_episode_or_call(what: Callable[[Group], Any], said: str) -> None:
    with pytest.raises(DataflowError, match=r"policies\.actor Doing") as caught:
        chain(advantage=Doing(what, "credit")).on_group(group([1.0, 0.0], num_calls=[2, 2]))
    assert said in str(caught.value)


def test_calls_of_an_unscored_episode_need_no_credit() -> None:
    own = chain(advantage=Doing(changed(call_advantages=[(1.0, 2.0), ()]), "credit"))
    result = own.on_group(group([1.0, None], num_calls=[2, 3]))
    assert isinstance(result, Group) and result.call_advantages == [(1.0, 2.0), ()]


def test_numbers_of_numpy_become_plain_ones() -> None:
    def credit(group: Group) -> Group:
        group.advantages = list(np.float32([0.5, -0.5]))  # type: ignore[arg-type]
        group.weight = np.float64(2.0)
        return group

    result = chain(advantage=Doing(credit, "credit")).on_group(group([1.0, 0.0]))
    assert isinstance(result, Group) and msgspec.json.encode([result.advantages, result.weight]) == b"[[0.5,-0.5],2.0]"


def test_tokens_are_read_once_and_only_for_those_that_need_them() -> None:
    seen, reads = [], []

    class Reading(Doing):
        needs_tokens = True

    def note(group: Group) -> Group:
        seen.append(group.tokens)
        return group

    def read() -> Any:
        reads.append(1)
        return [[tokens([1])], [tokens([2])]]

    result = chain(Doing(note), Reading(note), Doing(note), Reading(note)).on_group(group([1.0, 0.0]), read)
    assert [t is None for t in seen] == [True, False, True, False] and len(reads) == 1
    assert isinstance(result, Group) and result.tokens is None
    assert isinstance(chain(Doing(note)).on_group(group([1.0, 0.0]), read), Group) and len(reads) == 1


def credited(*rewards: float, row: int = 0) -> Group:
    return group(rewards, row=row, advantages=list(rewards))


def test_on_batch_may_change_credit_and_weight_of_all_groups() -> None:
    def double(groups: Sequence[Group]) -> None:
        for g in groups:
            g.weight, g.advantages = 2.0, [2 * a for a in g.advantages or ()]

    groups = [credited(1.0, 0.0), credited(0.5, row=1)]
    own = chain(OnBatch(double), OnBatch(double))
    own.on_batch(groups, 3)
    assert own.works_on_batches and not chain().works_on_batches
    assert [(g.advantages, g.weight) for g in groups] == [([4.0, 0.0], 2.0), ([2.0], 2.0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": [0.5, 0.5]}, "may change advantages, call_advantages and weight only"),
        ({"episode_ids": ["train/0/0/0"]}, "may change advantages, call_advantages and weight only"),
        ({"num_tokens": [9, 9]}, "may change advantages, call_advantages and weight only"),
        ({"advantages": [math.nan, 0.0]}, "advantages must be finite"),
        ({"advantages": [1.0]}, "advantages must be 2"),
        ({"advantages": None}, "must set advantages"),
        ({"weight": -1.0}, "weight must be >= 0"),
        ({"weight": None}, "weight must be finite"),
        ({"rewards": None}, "=rewards must stay as it is"),
        ({"advantages": 3.0}, "TypeError"),
    ],
)
def test_a_breach_in_on_batch_is_an_error_that_names_operator_and_group(change: dict[str, Any], said: str) -> None:
    def breach(groups: Sequence[Group]) -> None:
        for name, value in change.items():
            setattr(groups[1], name, value)

    with pytest.raises(DataflowError, match=r"policies\.actor OnBatch") as caught:
        chain(OnBatch(breach)).on_batch([credited(1.0, 0.0, row=7), credited(1.0, 0.0)], 3)
    assert said in str(caught.value) and "train/0/0" in str(caught.value)


def test_an_on_batch_that_raises_is_an_error_that_names_operator_and_step() -> None:
    with pytest.raises(DataflowError, match=r"policies\.actor OnBatch.*ZeroDivisionError.*batch of step 3"):
        chain(OnBatch(lambda groups: 1 / 0)).on_batch([credited(1.0)], 3)


def test_the_run_file_builds_the_chain_and_its_state_goes_through_a_snapshot() -> None:
    operators = ["zero_variance", "reward_normalize", "balance"]
    policy = small_config(
        policies__actor__operators=operators, policies__actor__algorithm={"advantage": "dr_grpo"}
    ).policies["actor"]
    own, again = chain_of("actor", policy), chain_of("actor", policy)
    own.on_group(group([1.0, 0.0]))
    again.load_state_dicts(msgspec.json.decode(msgspec.json.encode(own.state_dicts())))
    assert again.state_dicts() == own.state_dicts() != chain_of("actor", policy).state_dicts()


def test_a_list_that_cannot_be_is_refused_by_the_machine_too() -> None:
    with pytest.raises(ConfigError, match="must come before 'reward_clip'"):
        chain_of("actor", small_config(policies__actor__operators=["reward_clip", "zero_variance"]).policies["actor"])


def test_rewards_of_calls_may_change_and_go_away() -> None:
    one = group([1.0, 0.0], num_calls=[2, 1], rewards_per_call=[(0.5, 0.5), (0.0,)])
    result = chain(Doing(changed(rewards_per_call=[(1, np.float32(2)), ()]), "shape")).on_group(one)
    assert isinstance(result, Group) and result.rewards_per_call == [(1.0, 2.0), ()]


def test_what_on_group_may_change_is_told_in_full() -> None:
    with pytest.raises(
        DataflowError, match="may change rewards, rewards_per_call, advantages, call_advantages and wei"
    ):
        chain(Doing(changed(num_tokens=[1, 1]))).on_group(group([1.0, 0.0]))
