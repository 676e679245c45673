"""What a trainer says of the checkpoints that it finds: another model's, cut off ones, none that is whole."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from transformers import Qwen3ForCausalLM

from astraflow.config.schema import RunConfig
from astraflow.errors import ModelError, TrainingError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.tiny_char import make_config as tiny_config
from astraflow.models.tiny_char import make_tokenizer
from astraflow.training.learner import Learner


def config(model, **policy):
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 9},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": {"model": str(model), "optimizer": {"lr": 1e-3}, **policy}},
        }
    )


@pytest.fixture
def saved(tiny_char, make_table, random_rows, tmp_path):
    """A run directory with checkpoints of versions 1 and 2."""
    learner = Learner(config(tiny_char), "actor", tmp_path / "run")
    for seed in range(2):
        learner.train(make_table(random_rows([9, 14], seed)))
        learner.save()
    learner.close()
    return tmp_path / "run"


@pytest.fixture
def wider(tmp_path):
    """Another model with the same tokenizer."""
    settings = tiny_config()
    settings.intermediate_size += 8
    Qwen3ForCausalLM(settings).save_pretrained(tmp_path / "wider")
    make_tokenizer().save_pretrained(tmp_path / "wider")
    return tmp_path / "wider"


def resumed_at(model, run_dir, **policy):
    learner = Learner(config(model, **policy), "actor", run_dir)
    learner.close()
    return learner.version


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(saved, wider):
    said = r"is of another model than policies.actor.model \(model.layers.0.mlp.down_proj.weight is \(128, 384\), not"
    with pytest.raises(TrainingError, match=said) as caught:
        resumed_at(wider, saved)
    assert "put back the model" in caught.value.fix


@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state/optimizer.safetensors", "training_state/state.json"]
)
def test_a_truncated_newest_checkpoint_is_passed_over(saved, tiny_char, name, caplog):
    path = latest_checkpoint(saved / "checkpoints" / "actor") / name
    os.truncate(path, path.stat().st_size // 2)
    assert resumed_at(tiny_char, saved) == 1
    assert "step-000002 is damaged" in caplog.text and "passed over" in caplog.text


def test_without_a_whole_checkpoint_the_run_begins_anew(saved, tiny_char, caplog):
    for path in (saved / "checkpoints" / "actor").glob("step-*"):
        (path / "training_state" / "state.json").unlink()
    assert resumed_at(tiny_char, saved) == 0 and caplog.text.count("is damaged") == 2


def test_a_tied_output_layer_may_be_stored_or_not(saved, tiny_char, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    both = shutil.copytree(tiny_char, tmp_path / "both")
    tensors = load_file(both / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, both / "model.safetensors", {"format": "pt"})
    assert torch.equal(head, tensors["model.embed_tokens.weight"]) and resumed_at(both, saved) == 2


def test_a_missing_model_is_named_before_anything_else(tmp_path):
    with pytest.raises(ModelError, match=r"model=.*is neither a directory nor a built-in name"):
        resumed_at(tmp_path / "none", tmp_path / "run")


def test_a_config_of_other_shapes_is_refused_at_the_start(wider, tmp_path):
    settings = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(settings | {"intermediate_size": 100}))
    with pytest.raises(ModelError, match=r"tensor model.layers.0.mlp.gate_proj.weight.shape=.* must be \(100, 128\)"):
        resumed_at(wider, tmp_path / "run")


def test_weights_that_are_missing_are_not_made_up(wider, tmp_path):
    settings = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(
        json.dumps(settings | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(ModelError, match=r"tensor model.layers.2.self_attn.q_proj.weight=missing"):
        resumed_at(wider, tmp_path / "run")
