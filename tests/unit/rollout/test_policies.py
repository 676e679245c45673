"""What a node gives to its engines."""

from __future__ import annotations

import pytest

from astraflow.config.schema import PolicySection
from astraflow.engines.scripted import ScriptedEngine
from astraflow.rollout.policies import PolicyOptions, Weights, start_policy
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
