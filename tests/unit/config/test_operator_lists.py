"""Lists of operators are checked when the run file is loaded: order, doubles, places, all at once and with advice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.load import check_run
from astraflow.config.operators import operators_of_policy
from astraflow.errors import ConfigError
from astraflow.testing.dataflow import small_config

OWN = '''
from astraflow.contracts import Operator


class Short(Operator):
    """Drops groups with long answers."""

    def __init__(self, most: int = 10) -> None:
        if most < 1:
            raise ValueError("most is too small")
        self.most = most

    def on_group(self, group):
        return group if max(group.num_tokens) <= self.most else "too_long"


class Mean(Operator):
    phase = "credit"

    def on_group(self, group):
        group.advantages = [0.5] * len(group.rewards)
        return group


class Stranger:
    def on_group(self, group):
        return group


class Odd(Operator):
    phase = "first"


class Nowhere(Operator):
    place = "polcy"


class Text(Operator):
    makes = "normalized"


class Asks(Operator):
    def admit(self, task, view):
        return 0.5


class Misspelt(Operator):
    def on_groups(self, group):
        return group


class Keeps(Operator):
    """Has names of its own that are like those of hooks."""

    def selected(self, stored):
        return stored

    def retained(self, stored):
        return stored


class Taken(Operator):
    def __init__(self):
        self.estimator = 3


class Later(Operator):
    async def on_group(self, group):
        return group


class Reads(Operator):
    place = "source"
    needs_tokens = True


class Judges(Operator):
    place = "source"

    def on_group(self, group):
        return group

    def select(self, stored, groups, step):
        return []


def short(most: int) -> Operator:
    return Short(most)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a user, with entry points, as pip would install it."""
    (tmp_path / "own_operators.py").write_text(OWN)
    about = tmp_path / "own_operators-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-operators\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[astraflow.operators]\nshort = own_operators:Short\n[astraflow.advantages]\nown_mean = own_operators:Mean\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_operators", None)


def raw(operators: Any = ("zero_variance",), advantage: Any = "grpo", **changes: Any) -> dict[str, Any]:
    changes = {
        "policies__actor__operators": list(operators),
        "policies__actor__algorithm": {"advantage": advantage},
        "workflow__reward": "sums",
        "sources__train": {"type": "sums", **changes.pop("train", {})},
        **changes,
    }
    return small_config(**changes).model_dump(exclude_unset=True)


def problems(operators: Any = ("zero_variance",), advantage: Any = "grpo", **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_run(raw(operators, advantage, **changes), "run.toml")
    return caught.value.problems


EVERYTHING = [
    "zero_variance", "length_filter", "dedup", "reward_clip", "reward_scale",
    {"type": "overlong_penalty", "max_tokens": 100, "buffer_tokens": 20}, "balance", "staleness_weight",
]  # fmt: skip


def test_a_list_in_which_phases_rise_is_good() -> None:
    config = check_run(raw(EVERYTHING), "run.toml")
    made = operators_of_policy("actor", config.policies["actor"])
    assert not made.problems and [x.type for x in made.listed][:2] == ["zero_variance", "length_filter"]
    check_run(raw(["zero_variance", "reward_normalize"], {"type": "grpo", "normalize": False}), "run.toml")


def test_a_filter_after_a_shape_is_refused_with_the_order() -> None:
    assert problems(["reward_clip", "zero_variance"]) == [
        "policies.actor.operators.1='zero_variance' (filter) must come before 'reward_clip' (shape); the order is "
        "filter, shape, weight, and advantages are made between shape and weight"
    ]


def test_normalising_twice_is_refused_with_both_ways_out() -> None:
    assert problems(["reward_normalize"], "grpo") == [
        "policies.actor.algorithm.advantage='grpo' makes 'normalized', which policies.actor.operators.0="
        "'reward_normalize' makes already; remove one of them, or give policies.actor.algorithm.advantage the option "
        "normalize = false"
    ]
    (said,) = problems(["reward_normalize"], "reinforce_pp")
    assert said.endswith("makes already; remove one of them")
    (said,) = problems(["balance", {"type": "balance", "smooth": 0.5}])
    assert "operators.1='balance' makes 'balanced'" in said


def test_to_keep_and_to_drop_equal_groups_is_refused() -> None:
    (said,) = problems(["keep_all", "zero_variance"])
    assert "'zero_variance' makes 'the choice of equal groups', which policies.actor.operators.0='keep_all'" in said


def test_an_operator_of_a_source_with_hooks_of_a_policy_is_refused(own: Path) -> None:
    said = problems(train={"operators": ["own_operators:Judges"]})
    where = "sources.train.operators.0='own_operators:Judges'"
    assert said == [
        f"{where} overrides {hook}, which is never called for an operator of a source; remove it"
        for hook in ("on_group", "select")
    ]
    (one,) = problems(train={"operators": ["own_operators:Reads"]})
    assert "has needs_tokens, but operators of a source see no tokens" in one


def test_an_estimator_in_the_list_and_a_filter_as_estimator_are_sent_where_they_belong() -> None:
    assert problems(["zero_variance", "rloo"]) == [
        "policies.actor.operators.1='rloo' makes advantages; name it as policies.actor.algorithm.advantage"
    ]
    assert problems(advantage="zero_variance") == [
        "policies.actor.algorithm.advantage='zero_variance' makes no advantages; list it in policies.actor.operators"
    ]


def test_an_operator_of_the_other_place_is_refused() -> None:
    (said,) = problems(["filter_solved"])
    assert said == (
        "policies.actor.operators.0='filter_solved' is an operator of a source; list it in sources.<name>.operators"
    )
    (said,) = problems(train={"operators": ["zero_variance"]})
    assert said.startswith("sources.train.operators.0='zero_variance' is an operator of a policy; list it in policies.")


def test_all_problems_come_at_once() -> None:
    wrong = ["balance", "zero_varance", "reward_clip", {"type": "length_filter", "most": 3}, "rloo"]
    said = problems(wrong, {"type": "grpo", "eps": 0.0})
    assert len(said) == 5
    for part in ("zero_variance", "(shape) must come before 'balance' (weight)", "most=3", "'rloo' makes advantages"):
        assert any(part in s for s in said), part
    assert "policies.actor.algorithm.advantage: grpo.eps=0.0 must be > 0; use 1e-6" in said


def test_what_compares_siblings_needs_some() -> None:
    said = problems(workflow__group_size=1)
    assert len(said) == 2 and "workflow.group_size=1 must be >= 2 for policies.actor.operators.0='zero_var" in said[0]
    check_run(raw(["keep_all"], "reinforce_pp", workflow__group_size=1), "run.toml")
    (said_of_source, _) = problems(train={"group_size": 1})
    assert said_of_source.startswith("sources.train.group_size=1 must be >= 2")
    check_run(raw(workflow__group_size=1, train={"group_size": 2}), "run.toml")


def test_operators_of_a_user_come_by_path_by_entry_point_and_from_a_function(own: Path) -> None:
    listed: list[Any] = [
        {"type": "own_operators:Short", "most": 3}, {"type": "short", "most": 4},
        {"type": "own_operators:short", "most": 5},
    ]  # fmt: skip
    config = check_run(raw(listed, "own_mean"), "run.toml")
    made = operators_of_policy("actor", config.policies["actor"])
    assert [x.operator.most for x in made.listed] == [3, 4, 5]  # type: ignore[attr-defined]
    assert made.advantage is not None and type(made.advantage.operator).__name__ == "Mean"


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("own_operators:Stranger", "must inherit astraflow.contracts.Operator"),
        ("own_operators:Mean", "makes advantages; name it as policies.actor.algorithm.advantage"),
        ("own_operators:Odd", "is of phase 'first'; phases are filter, shape, credit, weight"),
        ("own_operators:Nowhere", "has place = 'polcy'; places are source, policy"),
        ("own_operators:Text", "has makes = 'normalized'; give a tuple of texts"),
        ("own_operators:Asks", "overrides admit, which is never called for an operator of a policy; remove it"),
        ("own_operators:Misspelt", "has a method on_groups, which is never called; did you mean on_group?"),
        ("own_operators:Taken", "sets estimator, which the list of its policy sets; give it another name"),
        ("own_operators:Later", "has an async on_group, which nobody awaits"),
        ("own_operators:Absent", "cannot be imported"),
        ({"type": "own_operators:Short", "most": 0}, "cannot be made (ValueError: most is too small)"),
        ({"type": "short", "least": 0}, "least=0 is not an option of this type"),
        ({"type": "keep_all", "most": 0}, "most=0 is not an option of this type; known: none"),
    ],
)
def test_operators_of_a_user_that_cannot_be_used_are_refused(own: Path, operator: Any, said: str) -> None:
    (problem,) = problems([operator])
    assert said in problem and "policies.actor.operators.0" in problem


def test_helpers_of_an_operator_may_be_called_almost_like_a_hook(own: Path) -> None:
    check_run(raw(["own_operators:Keeps"]), "run.toml")
