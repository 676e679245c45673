"""An engine that would serve a policy wrongly is refused when the run file is read."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.config.checks import engines
from astraflow.config.checks.engines import ABILITIES, Ability, engine_name, engine_problems
from astraflow.config.load import check_run
from astraflow.config.rooms import ROOMS
from astraflow.config.schema import EngineSection, RunConfig
from astraflow.config.serving import serving_problems
from astraflow.errors import ConfigError


def run_of(*nodes: dict[str, Any], **policy: Any) -> RunConfig:
    return RunConfig.model_validate(raw_of(*nodes, **policy))


def raw_of(*nodes: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return {
        "run": {"name": "r", "steps": 4},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "single_turn"},
        "policies": {"actor": {"model": "tiny-char", **policy}},
        "rollout": {"nodes": [{"name": f"n{i}", **node} for i, node in enumerate(nodes)]},
    }


def problems(*nodes: dict[str, Any], **policy: Any) -> list[str]:
    return engine_problems(run_of(*nodes, **policy))


def test_bounds_of_the_load_that_cross() -> None:
    config = RunConfig.model_validate({
        "run": {"name": "r", "steps": 4}, "sources": {}, "workflow": {"type": "single_turn"}, "policies": {},
        "rollout": {"nodes": [{"concurrency": 8, "min_concurrency": 8}, {"concurrency": 8, "min_concurrency": 9}]},
    })  # fmt: skip
    (problem,) = engine_problems(config)
    assert problem.startswith("rollout.nodes.1.min_concurrency=9 must be <= concurrency=8")


def test_policies_that_a_node_serves() -> None:
    assert problems({"serves": ["actor"], "listen": "10.0.0.5:7801"}, {"listen": "[::1]:0", "workers": 0}) == []
    unknown, idle = problems({"serves": ["judge"], "engines": {"actor": {"dtype": "bfloat16"}}})
    assert unknown == "rollout.nodes.0.serves='judge' names no policy of this run; known: actor"
    assert idle.startswith("rollout.nodes.0.engines.actor has no effect, as rollout.nodes.0.serves=['judge'] leaves it")


@pytest.mark.parametrize("listen", ["7801", "host:", "host:70000", "0.0.0.0:7801", "[::]:1"])
def test_addresses_by_which_nobody_reaches_a_node(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.nodes.0.listen.*must be"):
        check_run(raw_of({"listen": listen}), "run file")


@pytest.fixture
def frozen_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    poor = Ability(("bfloat16",), "bfloat16", adapters=False, whole_logprobs=False, versions=False)
    monkeypatch.setattr(engines, "ABILITIES", {**ABILITIES, "poor": poor})


def test_every_engine_of_the_room_is_in_the_table() -> None:
    assert set(ABILITIES) == set(ROOMS["engines"])


@pytest.mark.parametrize("engine", ["local", "vllm", "sglang", "scripted", "package.module:Engine"])
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


@pytest.mark.usefixtures("frozen_remote")
def test_the_engine_of_each_node_is_checked() -> None:
    nodes = {}, {"engines": {"actor": "poor"}}, {"engines": {"actor": {"type": "local", "dtype": "int8"}}}
    found = problems(*nodes, lora={})
    assert [problem.split(" cannot")[0].split(" is not")[0] for problem in found] == [
        "rollout.nodes.1.engines.actor='poor'", "policies.actor.lora", "rollout.nodes.2.engines.actor.dtype='int8'",
    ]  # fmt: skip
    assert "rollout.nodes.1.engines.actor='poor'" in found[1]
    (problem,) = problems({"engines": {"actr": "local"}})
    assert problem == "rollout.nodes.0.engines.actr names no policy of this run; known: actor"


def test_a_type_of_a_node_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"rollout.nodes.1.engines.actor=locl is not a known name of engines"):
        check_run(raw_of({}, {"engines": {"actor": "locl"}}), "here")


def test_the_engine_of_a_node_is_what_its_name_says() -> None:
    config = run_of({}, {"engines": {"actor": {"dtype": "bfloat16"}}})
    assert config.engines_of("n0") == config.engines_of("elsewhere") == {}
    assert config.engines_of("n1")["actor"].model_dump() == {"type": "local", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({}, "local-float32"),
        ({"type": "vllm"}, "vllm-bfloat16"),
        ({"type": "vllm", "dtype": "float32"}, "vllm-float32"),
        ({"type": "package.module:Mine"}, "Mine"),
        ({"type": "mine.py:Mine", "dtype": "fp8"}, "Mine-fp8"),
    ],
)
def test_names_of_engines(section: dict[str, Any], name: str) -> None:
    assert engine_name(EngineSection.model_validate(section)) == name


def test_corrections_of_an_engine_take_the_place_of_the_others() -> None:
    algorithm = {"loss": "gspo", "engine_corrections": {"local-bfloat16": ["truncate"]}}
    half = {"engines": {"actor": {"dtype": "bfloat16"}}}
    assert problems({}, half, algorithm=algorithm) == []
    (problem,) = problems({}, half, algorithm={"loss": "gspo"})
    assert problem.startswith("rollout.nodes.1.engines.actor.dtype='bfloat16' cannot be with")
    (problem,) = problems({}, half, algorithm={"loss": "gspo", "engine_corrections": {"vllm-bfloat16": ["truncate"]}})
    assert problem.startswith("rollout.nodes.1.engines.actor.dtype='bfloat16' cannot be with")


def test_corrections_of_an_engine_that_nobody_has() -> None:
    (problem,) = problems({}, algorithm={"engine_corrections": {"local-bf16": [], "Mine": []}, "corrections": []})[:1]
    assert "engine_corrections.local-bf16 names no engine" in problem and "did you mean 'local-bfloat16'?" in problem
    assert problems({"engines": {"actor": "a.b:Mine"}}, algorithm={"engine_corrections": {"Mine": []}}) == []


def test_replay_of_old_data_needs_a_correction_for_every_engine() -> None:
    replay = {"type": "replay", "ratio": 0.5, "max_age": 9}
    weighed = {"corrections": ["truncate"], "engine_corrections": {"local-bfloat16": ["mask"]}}
    assert serving_problems(run_of({}, algorithm=weighed, operators=[replay])) == []
    bare = {"corrections": ["truncate"], "engine_corrections": {"local-float32": []}}
    (problem,) = serving_problems(run_of({}, algorithm=bare, operators=[replay]))
    assert "does not correct off-policy data" in problem


def test_agents_cannot_choose_a_temperature_whose_logprobs_an_engine_cannot_say() -> None:
    (problem,) = problems(engine="sglang", sampling={"agents_choose": ["temperature"]})
    assert problem.startswith("policies.actor.sampling.agents_choose=['temperature'] cannot be with")
    assert problems(engine="sglang", sampling={"agents_choose": ["temperature"]}, frozen=True) == []
    assert problems(engine="vllm", sampling={"agents_choose": ["temperature"]}) == []


def test_a_service_elsewhere_serves_frozen_policies_only() -> None:
    engine = {"type": "remote", "url": "https://judge.example/v1"}
    found = problems(engine=engine)
    assert any("policies.actor.engine='remote' cannot take new weights" in problem for problem in found)
    assert problems(engine=engine, frozen=True, sampling={"temperature": 0}) == []
    (problem,) = problems(engine=engine, copy_of={"policy": "other"})
    assert "use it for a policy with frozen = true" in problem
