"""An engine that would serve a policy wrongly is refused when the run file is read."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.config.checks import engines
from astraflow.config.checks.engines import ABILITIES, Ability, engine_problems
from astraflow.config.rooms import ROOMS
from astraflow.config.schema import RunConfig


def problems(**policy: Any) -> list[str]:
    run = {"name": "r", "steps": 4}
    actor = {"model": "tiny-char", **policy}
    return engine_problems(
        RunConfig.model_validate(
            {
                "run": run,
                "sources": {"train": {"type": "calculator"}},
                "workflow": {"type": "single_turn"},
                "policies": {"actor": actor},
            }
        )
    )


def test_bounds_of_the_load_that_cross() -> None:
    config = RunConfig.model_validate({
        "run": {"name": "r", "steps": 4}, "sources": {}, "workflow": {"type": "single_turn"}, "policies": {},
        "rollout": {"nodes": [{"concurrency": 8, "min_concurrency": 8}, {"concurrency": 8, "min_concurrency": 9}]},
    })  # fmt: skip
    (problem,) = engine_problems(config)
    assert problem.startswith("rollout.nodes.1.min_concurrency=9 must be <= concurrency=8")


@pytest.fixture
def frozen_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    poor = Ability(("bfloat16",), "bfloat16", adapters=False, whole_logprobs=False, versions=False)
    monkeypatch.setattr(engines, "ABILITIES", {**ABILITIES, "poor": poor})


def test_every_engine_of_the_room_is_in_the_table() -> None:
    assert set(ABILITIES) == set(ROOMS["engines"])


@pytest.mark.parametrize("engine", ["local", "vllm", "scripted", "package.module:Engine"])
def test_what_all_can_do_is_not_refused(engine: str) -> None:
    assert problems(engine=engine, lora={}, sampling={"top_p": 0.9, "min_p": 0.1, "top_k": 5}) == []


def test_a_precision_that_an_engine_has_not() -> None:
    (problem,) = problems(engine={"type": "local", "dtype": "int8"})
    assert problem == "policies.actor.engine.dtype='int8' is not one of float32, bfloat16, float16; choose one of them"


@pytest.mark.parametrize(
    ("engine", "trainer", "setting"),
    [
        ("vllm", "float32", "engine.dtype='bfloat16'"),
        ({"type": "local", "dtype": "bfloat16"}, "float32", "engine.dtype='bfloat16'"),
        ("local", "bfloat16", "trainer.dtype='bfloat16'"),
    ],
)
def test_rounding_is_larger_than_the_clip_of_gspo(engine: Any, trainer: str, setting: str) -> None:
    settings: dict[str, Any] = {"engine": engine, "trainer": {"dtype": trainer}}
    (problem,) = problems(**settings, algorithm={"loss": "gspo"})
    assert problem.startswith(f"policies.actor.{setting} cannot be with policies.actor.algorithm.loss='gspo'")
    for algorithm in (
        {"loss": "gspo", "anchor": "proximal"},
        {"loss": "gspo", "corrections": ["truncate"]},
        {"loss": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.1}},
        {"loss": "ppo_clip"},
    ):
        assert problems(**settings, algorithm=algorithm) == []


def test_gspo_in_full_precision_is_right() -> None:
    assert problems(engine={"type": "vllm", "dtype": "float32"}, algorithm={"loss": "gspo"}) == []


@pytest.mark.usefixtures("frozen_remote")
def test_pairs_that_an_engine_cannot_serve() -> None:
    found = problems(engine="poor", lora={}, sampling={"agents_choose": ["top_k"]})
    assert [problem.split(" cannot")[0] for problem in found] == [
        "policies.actor.engine='poor'", "policies.actor.lora", "policies.actor.sampling.top_k",
    ]  # fmt: skip
    assert problems(engine="poor", frozen=True) == []
