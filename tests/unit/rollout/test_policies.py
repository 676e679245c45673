"""What a node gives to its engines."""

from __future__ import annotations

from contextlib import closing

import pytest

from astraflow.config.schema import EngineSection, PolicySection
from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import ConfigError, ModelError
from astraflow.rollout.policies import PolicyOptions, Weights, served_here, start_policy
from astraflow.testing.engines.effective import run_config, write_model
from astraflow.training.learner import Learner
from astraflow.weights.client import WeightClient


@pytest.mark.parametrize("change", ["node", "run", "policy"])
async def test_nodes_runs_and_policies_sample_noise_of_their_own(tmp_path, monkeypatch, change):
    seeds = []

    class Watched(ScriptedEngine):
        def __init__(self, *args, seed, **options):
            super().__init__(*args, **options)
            seeds.append(seed)

    monkeypatch.setattr("astraflow.engines.scripted.ScriptedEngine", Watched)
    section = PolicySection.model_validate({"model": "tiny-char", "engine": {"type": "scripted", "script": ["."]}})
    other = {"node": ("actor", "b", 0), "run": ("actor", "a", 1), "policy": ("helper", "a", 0)}[change]
    for name, node, seed in [("actor", "a", 0), ("actor", "a", 0), other]:
        weights = Weights(name, WeightClient(None), lambda: None)
        endpoint = await start_policy(name, section, PolicyOptions(tmp_path, seed, node, 4, 1), weights, 2)
        for engine in endpoint.engines:
            engine.close()
    assert seeds[:2] == seeds[2:4] and len({*seeds[:2], *seeds[4:]}) == 4, "pasts of one policy have their own, too"


async def test_a_node_without_the_base_of_an_adapter_says_so(tmp_path):
    model = write_model(tmp_path / "model", tied=True)
    with closing(Learner(run_config(model, {"lora": {"rank": 2}}), "actor", tmp_path)) as learner:
        weights = Weights("actor", WeightClient(None), lambda: None)
        weights.announce(learner.store.latest())
        section = learner.section.model_copy(update={"model": str(tmp_path / "elsewhere")})
        with pytest.raises(ModelError, match=r"policies\.actor\.model=.*elsewhere is the base of the published"):
            await start_policy("actor", section, PolicyOptions(tmp_path, 0, "n", 4, 1), weights)


def types_of(config, node, **given):
    engines = {name: EngineSection.model_validate(engine) for name, engine in given.items()}
    here, _ = served_here(config, node, engines)
    return {name: policy.engine.model_dump() for name, policy in here.policies.items()}


def test_a_node_serves_by_the_engines_of_its_name_or_those_that_it_is_given(tmp_path):
    nodes = [{"name": "a"}, {"name": "b", "engines": {"actor": {"dtype": "bfloat16"}}}]
    config = run_config(tmp_path, {}).model_dump() | {"rollout": {"nodes": nodes}}
    config = type(run_config(tmp_path, {})).model_validate(config)
    assert types_of(config, "a") == types_of(config, "by-hand") == {"actor": {"type": "local"}}
    assert types_of(config, "b") == {"actor": {"type": "local", "dtype": "bfloat16"}}
    assert types_of(config, "b", actor={"max_context": 64}) == {"actor": {"type": "local", "max_context": 64}}
    with pytest.raises(ConfigError) as wrong:
        types_of(config, "a", actor={"dtype": "int8", "threds": 2}, judge={})
    said = str(wrong.value)
    assert "--engine actor.dtype='int8' is not one of" in said and "did you mean 'threads'?" in said
    assert "--engine judge names no policy of this run; known: actor" in said
