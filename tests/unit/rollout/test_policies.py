"""What a node gives to its engines."""

from __future__ import annotations

from contextlib import closing

import pytest

from astraflow.config.schema import PolicySection
from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import ModelError
from astraflow.rollout.policies import PolicyOptions, Weights, start_policy
from astraflow.testing.engines.effective import run_config, write_model
from astraflow.training.learner import Learner
from astraflow.weights.client import WeightClient


@pytest.mark.parametrize("change", ["node", "run"])
async def test_nodes_and_runs_sample_noise_of_their_own(tmp_path, monkeypatch, change):
    seeds = []

    class Watched(ScriptedEngine):
        def __init__(self, *args, seed, **options):
            super().__init__(*args, **options)
            seeds.append(seed)

    monkeypatch.setattr("astraflow.engines.scripted.ScriptedEngine", Watched)
    section = PolicySection.model_validate({"model": "tiny-char", "engine": {"type": "scripted", "script": ["."]}})
    for node, seed in [("a", 0), ("a", 0), ("b", 0) if change == "node" else ("a", 1)]:
        weights = Weights("actor", WeightClient(None), lambda: None)
        endpoint = await start_policy("actor", section, PolicyOptions(tmp_path, seed, node, 4, 1), weights)
        endpoint.engine.close()
    assert seeds[0] == seeds[1] != seeds[2]


async def test_a_node_without_the_base_of_an_adapter_says_so(tmp_path):
    model = write_model(tmp_path / "model", tied=True)
    with closing(Learner(run_config(model, {"lora": {"rank": 2}}), "actor", tmp_path)) as learner:
        weights = Weights("actor", WeightClient(None), lambda: None)
        weights.announce(learner.store.latest())
        section = learner.section.model_copy(update={"model": str(tmp_path / "elsewhere")})
        with pytest.raises(ModelError, match=r"policies\.actor\.model=.*elsewhere is the base of the published"):
            await start_policy("actor", section, PolicyOptions(tmp_path, 0, "n", 4, 1), weights)
