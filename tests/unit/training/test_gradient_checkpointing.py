"""The setting `trainer.gradient_checkpointing` changes what is kept, not what is learnt."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from astraflow.config.schema import RunConfig
from astraflow.models.scoring import recompute
from astraflow.training.learner import Learner


def _layers(model):
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _recomputed(model):
    return [layer.__dict__["forward"].func is recompute._forward for layer in _layers(model)]


@pytest.fixture
def make_learner(tiny_char, tmp_path):
    """A learner of the character model, with trainer settings."""

    def make(name, **trainer):
        config = RunConfig.model_validate(
            {
                "run": {"name": "r", "steps": 6, "seed": 4},
                "sources": {"train": {"type": "calculator"}},
                "workflow": {"type": "single_turn"},
                "policies": {"actor": {"model": str(tiny_char), "trainer": {"device": "cpu", **trainer}}},
            }
        )
        return Learner(config, "actor", tmp_path / name, threads=1)

    return make


def test_a_step_with_it_gives_the_same_weights(make_learner, make_table, random_rows):
    batch = make_table(random_rows([20, 9, 14, 33]))
    weights = {}
    for name, wanted in {"off": False, "on": True}.items():
        learner = make_learner(name, gradient_checkpointing=wanted)
        learner.train(batch)
        learner.close()
        assert _recomputed(learner.model) == [wanted, wanted]
        weights[name] = torch.cat([p.detach().flatten() for p in learner.model.parameters()])
    torch.testing.assert_close(weights["on"], weights["off"], rtol=1e-5, atol=1e-7)
