"""Where training tasks come from: `train_source` or `[mix]`, and the settings of sources."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.config.load import check_run, config_from_json, resolved_json
from astraflow.errors import ConfigError


def raw(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "run": {"name": "x", "steps": 5},
        "sources": {"train": {"type": "sums"}, "b": {"type": "sums"}, "held": {"type": "sums"}},
        "workflow": {"type": "single_turn", "reward": "exact", "prompt": "{question}", "group_size": 2},
        "policies": {"actor": {"model": "tiny-char"}},
        "evaluation": {"source": "held"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = base
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return base


def problems_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_run(raw(**changes), "file")
    return caught.value.problems


def test_training_sources_and_their_group_sizes() -> None:
    assert check_run(raw(), "file").train_sources == ["train"]
    assert check_run(raw(train_source="b"), "file").train_sources == ["b"]
    config = check_run(raw(mix__ratios={"b": 1, "train": [0, 2]}, sources__b={"type": "sums", "group_size": 5}), "file")
    assert config.train_sources == ["b", "train"]
    assert (config.group_size("b"), config.group_size("train")) == (5, 2)
    assert config.mix is not None and config.mix.ratios == {"b": (1.0, 1.0), "train": (0.0, 2.0)}
    assert config_from_json(resolved_json(config)) == config


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({}, "mix.ratios={} leave no share at the start"),
        ({"train": 0, "b": 0}, "mix.ratios=train = 0, b = 0 leave no share at the start"),
        ({"train": [1, 0], "b": 0}, "mix.ratios=train = 0, b = 0 leave no share at the end"),
        ({"trian": 1}, "mix.ratios.trian='trian' names no source; did you mean 'train'?"),
        ({"train": -1}, "mix.ratios.train.0=-1 must be greater than or equal to 0"),
        ({"train": float("nan")}, "mix.ratios.train=nan must be"),
        ({"train": float("inf")}, "mix.ratios.train=inf must be"),
        ({"train": [1, 2, 3]}, "mix.ratios.train=[1, 2, 3] Tuple should have at most 2 items"),
        ({"train": "much"}, "mix.ratios.train='much' must be"),
    ],
)
def test_a_mix_that_cannot_be(ratios: dict[str, Any], said: str) -> None:
    assert any(problem.startswith(said) for problem in problems_of(mix__ratios=ratios))


def test_a_mix_beside_train_source_is_refused() -> None:
    (problem,) = problems_of(mix__ratios={"train": 1}, train_source="train")
    assert problem.startswith("train_source='train' cannot be given beside [mix]")


def test_settings_of_a_source_without_training_tasks_are_refused() -> None:
    said = problems_of(sources__held={"type": "sums", "operators": ["greso"], "group_size": 3})
    assert [problem.partition(":")[0] for problem in said] == [
        "sources.held.operators has no effect", "sources.held.group_size has no effect",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("zero_variance", "sources.train.operators.0='zero_variance' is an operator of a policy; list it in policies."),
        ("grpo", "sources.train.operators.0='grpo' makes advantages; name it as policies.<name>.algorithm.advantage"),
        ("gresso", "sources.train.operators.0.type=gresso is not a known name of operators; did you mean 'greso'?"),
        ({"type": "greso", "p_easy": 2}, "sources.train.operators.0: greso.p_easy=2 must be from 0.01 to 0.99"),
        ({"type": "filter_solved", "abov": 1}, "sources.train.operators.0.abov=1 is not an option of this type"),
        ({"type": "filter_solved", "above": "1"}, "sources.train.operators.0.above='1' must be a valid number"),
        ("curriculum", "sources.train.operators.0.by is missing; this type needs it"),
    ],
)
def test_an_operator_in_the_wrong_place_or_with_wrong_options(operator: Any, said: str) -> None:
    (problem,) = problems_of(sources__train={"type": "sums", "operators": [operator]})
    assert problem.startswith(said), problem


def test_an_operator_of_a_source_in_the_list_of_a_policy() -> None:
    (problem,) = problems_of(policies__actor={"model": "tiny-char", "operators": ["greso"]})
    assert problem.startswith("policies.actor.operators.0='greso' is an operator of a source; list it in sources.")


def test_a_group_of_one_is_refused_where_siblings_are_compared() -> None:
    train = {"type": "sums", "group_size": 1, "operators": ["greso"]}
    said = problems_of(sources__train=train)
    for name in ("sources.train.operators.0='greso'", "policies.actor.algorithm.advantage='grpo'"):
        assert any(p.startswith(f"sources.train.group_size=1 must be >= 2 for {name}") for p in said)
    assert check_run(raw(workflow__group_size=1, sources__train={"type": "sums", "group_size": 2}), "file")
    assert check_run(raw(sources__b={"type": "sums"}, mix__ratios={"b": 1}), "file")
