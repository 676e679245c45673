"""The setting `trainer.frozen`: parts of a model that keep their weights, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from astraflow.config.schema import RunConfig
from astraflow.errors import ModelError
from astraflow.models.load import load_model, load_tensors, state_tensors
from astraflow.models.stored import in_part
from astraflow.training.learner import Learner
from astraflow.training.optimize.frozen import freeze
from astraflow.training.sft import run_sft

LAYERS = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 10)]
NAMES = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight"]
FROZEN = ["embed_tokens", "layers.0", "norm"]


@pytest.fixture
def make_learner(tiny_char, tmp_path):
    def make(name, **trainer):
        return Learner(_config(tiny_char, **trainer), "actor", tmp_path / name, threads=1)

    return make


def _config(directory, **trainer):
    return RunConfig.model_validate({
        "run": {"name": "r", "steps": 6, "seed": 4},
        "sources": {"train": {"type": "calculator"}, "demos": {"type": "calculator", "demos": True}},
        "workflow": {"type": "single_turn"},
        "policies": {
            "actor": {
                "model": str(directory), "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "grad_clip": 1e9},
                "trainer": {"device": "cpu", **trainer}, "warm_start": {"source": "demos", "steps": 2, "batch": 4},
            }
        },
    })  # fmt: skip


@pytest.mark.parametrize(
    ("part", "found"),
    [("layers.1", [2]), ("layers", [1, 2, 3]), ("mlp", [1, 2, 3]), ("model.norm", [4]), ("embed_tokens.weight", [0])],
)
def test_a_part_is_whole_steps_of_a_name(part, found):
    assert in_part(part, NAMES) == [NAMES[i] for i in found]


@pytest.mark.parametrize("part", ["layers.2", "embed", "", "odel.norm", "embedtokens"])
def test_a_part_that_is_none_of_the_model_is_named(part):
    with pytest.raises(ModelError, match=f"trainer.frozen={part} is no part of this model") as caught:
        in_part(part, NAMES)
    assert ("did you mean 'embed_tokens'?" in str(caught.value)) == (part == "embedtokens")


def test_a_model_of_which_nothing_is_left_is_refused(make_model):
    with pytest.raises(ModelError, match="leaves nothing to train"):
        freeze(make_model(), ["model"])


def test_frozen_parts_keep_their_weights_and_have_no_moments(make_learner, tiny_char, make_table, random_rows):
    batch = make_table(random_rows([20, 9, 14, 33]))
    for more in ({}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}):
        learner = make_learner(f"run-{len(more)}{more}", frozen=FROZEN, **more)
        start = {name: tensor.clone() for name, tensor in state_tensors(learner.model).items()}
        learner.train(batch)
        learner.save()
        learner.close()
        own = state_tensors(learner.model)
        kept = {name for name in own if torch.equal(own[name], start[name])}
        assert kept == {name for part in FROZEN for name in in_part(part, own)}
        assert len(learner.stepper.optimizer.state) == len(own) - len(kept)


def test_the_gradient_of_the_others_is_the_same(make_learner, make_table, random_rows):
    batch, seen = make_table(random_rows([20, 9, 14, 33])), []
    for frozen in ([], FROZEN):
        learner, found = make_learner(f"run{len(frozen)}", frozen=frozen), {}
        load_tensors(learner.model, seen[0][0] if seen else state_tensors(learner.model))  # two warm starts differ
        start = {name: tensor.clone() for name, tensor in state_tensors(learner.model).items()}
        learner.stepper.optimizer.register_step_pre_hook(
            lambda *_, found=found, model=learner.model: found.update(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
        )
        learner.train(batch)
        learner.close()
        seen.append((start, found))
    (_, whole), (_, part) = seen
    assert part.keys() == whole.keys() - {name for name in whole for p in FROZEN if f".{p}." in f".{name}."}
    assert part and all(torch.equal(part[name], whole[name]) for name in part)


def test_a_resumed_run_goes_on_bit_for_bit(make_learner, make_table, random_rows):
    batch = make_table(random_rows([20, 9, 14, 33]))
    whole, first = make_learner("whole", frozen=FROZEN), make_learner("cut", frozen=FROZEN)
    for _ in range(3):
        whole.train(batch)
    first.train(batch)
    first.save()
    first.close()
    again = make_learner("cut", frozen=FROZEN)
    again.train(batch), again.train(batch)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    whole.close(), again.close()


def test_sft_keeps_them_too(tiny_char, tmp_path):
    run_sft(tiny_char, tmp_path / "sft", _config(tiny_char, frozen=["layers"]), "actor")
    own, base = state_tensors(load_model(tmp_path / "sft")), state_tensors(load_model(tiny_char))
    assert {name for name in own if torch.equal(own[name], base[name])} == set(in_part("layers", own))
