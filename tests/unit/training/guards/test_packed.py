"""Models that packing would score wrongly are refused; the others are scored as they score themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPTNeoConfig,
    GptOssConfig,
    Lfm2Config,
    MambaConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from astraflow.config.schema import RunConfig
from astraflow.errors import ModelError
from astraflow.models.scoring.attention import IMPLEMENTATION
from astraflow.models.scoring.guard import prepared_as_itself
from astraflow.training.learner import Learner

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {f"linear_{name}": size for name, size in (
    ("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8), ("value_head_dim", 8),
)}  # fmt: skip
REFUSED = {
    "attention sinks": lambda: GptOssConfig(**SHAPE, **EXPERTS, num_local_experts=4),
    "linear attention": lambda: Qwen3_5TextConfig(
        **SHAPE, **LINEAR, layer_types=["linear_attention", "full_attention"]
    ),
    "convolution": lambda: Lfm2Config(**SHAPE | {"vocab_size": 62}, layer_types=["conv", "full_attention"]),
    "state space": lambda: MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=8),
    "position biases": lambda: FalconConfig(**SIZES, alibi=True),
    "attention of its own": lambda: GPTNeoConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=4, max_position_embeddings=64,
    ),
}  # fmt: skip


def _model(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) / 5)
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_do_not_go_through_packed_attention_are_refused(kind):
    with pytest.raises(ModelError, match=r"policies\.actor\.model=\w+ gives other logprobs packed than alone"):
        prepared_as_itself(_model(REFUSED[kind]()), "policies.actor.model")


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gpt2"])
def test_plain_decoders_are_prepared(make_model, family):
    model, state = make_model(family), torch.get_rng_state()
    assert prepared_as_itself(model, "model").config._attn_implementation == IMPLEMENTATION
    assert torch.equal(torch.get_rng_state(), state)  # a resumed run draws what an uninterrupted one does


def test_experts_are_prepared():
    prepared_as_itself(_model(Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4)), "model")


def test_a_trainer_refuses_it_at_its_start(tiny_char, tmp_path):
    directory = tmp_path / "model"
    _model(REFUSED["convolution"]()).save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes((tiny_char / "tokenizer.json").read_bytes())
    config = RunConfig.model_validate({
        "run": {"name": "r", "steps": 2}, "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "single_turn"},
        "policies": {"actor": {"model": str(directory), "trainer": {"device": "cpu"}}},
    })  # fmt: skip
    with pytest.raises(ModelError, match="packed than alone"):
        Learner(config, "actor", tmp_path / "run")
