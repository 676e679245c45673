"""Models that packing would score wrongly are refused; the others are scored as they score themselves."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPTNeoConfig,
    GptOssConfig,
    Lfm2Config,
    MambaConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from astraflow.config.schema import RunConfig
from astraflow.errors import ModelError
from astraflow.models.scoring.attention import IMPLEMENTATION, packed_attention
from astraflow.models.scoring.guard import prepared_as_itself
from astraflow.models.scoring.layout import pack_layout
from astraflow.training.learner import Learner

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {f"linear_{name}": size for name, size in (
    ("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8), ("value_head_dim", 8),
)}  # fmt: skip
REFUSED = {
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


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (GptOssConfig(**SHAPE, **EXPERTS, num_local_experts=4), "s_aux"),
        (Gemma2Config(**SHAPE, attn_logit_softcapping=20.0, final_logit_softcapping=None), "softcap"),
    ],
)
def test_attention_of_another_kind_is_refused_by_the_name_of_what_it_asks_for(config, asked):
    with pytest.raises(ModelError, match=rf"policies\.actor\.model=\w+ cannot run packed \(it asks for {asked}\)"):
        prepared_as_itself(_model(config), "policies.actor.model")


@pytest.mark.parametrize(
    ("others", "refused"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux"), ({"head_mask": torch.ones(4), "new": 0}, "head_mask, new"),
        ({"is_causal": False}, "is_causal"), ({"dropout": 0.1}, "dropout"), ({"softcap": 30.0}, "softcap"),
        ({"dropout": 0.0, "is_causal": True, "position_ids": torch.zeros(1), "s_aux": None}, ""),
    ],
)  # fmt: skip
def test_the_attention_refuses_what_it_does_not_know(others, refused):
    query = torch.randn(1, 4, 6, 8)
    layout = pack_layout(np.array([0, 6], np.int32), None, query.device, query.dtype)
    expect = pytest.raises(ModelError, match=rf"it asks for {refused}\)") if refused else contextlib.nullcontext()
    with expect:
        packed_attention(torch.nn.Identity(), query, query, query, None, pack_layout=layout, **others)


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
