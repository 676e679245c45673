"""Gradient checkpointing: the same gradients, fewer kept activations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from astraflow.config.schema import LoraSection
from astraflow.errors import ModelError
from astraflow.models.lora.layers import add_lora
from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_lists
from astraflow.models.scoring.recompute import recompute_activations
from kept import kept_bytes

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0.5)),
}


def pack():
    """Three sequences in one pack."""
    draw = np.random.default_rng(0)
    examples = [(draw.integers(3, 61, size), np.arange(size) > 2) for size in (40, 17, 9)]
    (made,) = pack_rows(rows_from_lists(examples), 1000)
    return made


def gradient_and_kept(model):
    """Of the sum of logprobs; bytes of what the forward pass keeps."""
    total, kept = kept_bytes(lambda: packed_logprobs(model, pack(), 1.0).logprobs.sum())
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, kept


@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_equal_and_less_is_kept(family):
    torch.manual_seed(0)
    model = prepare_model(MODELS[family]())
    other = recompute_activations(copy.deepcopy(model))
    expected, much = gradient_and_kept(model)
    found, little = gradient_and_kept(other)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    assert little < 0.5 * much


def test_it_survives_eval_and_a_copy():
    torch.manual_seed(0)
    model = prepare_model(MODELS["llama"]())
    _, much = gradient_and_kept(model)
    copied = copy.deepcopy(recompute_activations(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    prepare_model(copied)
    gradients, little = gradient_and_kept(copied)
    assert little < 0.5 * much
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())  # of its own layers, not of the zeroed ones


def test_adapters_on_a_frozen_base_get_their_gradients():
    torch.manual_seed(0)
    model = prepare_model(MODELS["llama"]())
    add_lora(model, LoraSection(rank=4))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    other = recompute_activations(copy.deepcopy(model))
    expected, _ = gradient_and_kept(model)
    found, _ = gradient_and_kept(other)
    assert expected and found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_model_without_such_layers_is_an_error():
    class Bare(nn.Module):
        pass

    with pytest.raises(ModelError, match=r"gradient_checkpointing=True finds no such layers in Bare"):
        recompute_activations(Bare())
