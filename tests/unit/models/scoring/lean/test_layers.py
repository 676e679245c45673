"""Layers that keep less: the same logprobs to the bit, the same gradients, fewer kept numbers."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from astraflow.config.schema import LoraSection
from astraflow.models.linear import FastLinear
from astraflow.models.lora.layers import add_lora
from astraflow.models.scoring.attention import IMPLEMENTATION
from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.lean import layers as lean
from astraflow.models.scoring.lean.layers import LeanMlp, LeanNorm, make_lean
from astraflow.models.scoring.packing import pack_rows, rows_from_lists
from kept import kept_bytes

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SHAPE, **more)),
    "mistral": lambda **more: MistralForCausalLM(MistralConfig(**SHAPE, **more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True, **more)),
    "smollm3": lambda **more: SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, **more)),
}


def drawn(family, **more):
    """A model whose norms are not all ones, and the same as transformers has it."""
    torch.manual_seed(0)
    plain = FAMILIES[family](**more)
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    model = prepare_model(copy.deepcopy(plain))
    plain.set_attn_implementation(IMPLEMENTATION)
    return model, plain.eval()


def pack(sizes=(40, 17, 9)):
    """Sequences in one pack."""
    draw = np.random.default_rng(0)
    examples = [(draw.integers(3, 61, size), np.arange(size) > 2) for size in sizes]
    (made,) = pack_rows(rows_from_lists(examples), 4000)
    return made


def scored(model, what, dtype=None):
    """Logprobs, gradients of a sum over them, kept bytes."""

    def forward():
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            return packed_logprobs(model, what, 1.0).logprobs

    logprobs, kept = kept_bytes(forward)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept


def assert_close(found, expected, tolerance=1e-5):
    """Gradients by name."""
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_equal_to_the_bit_and_less_is_kept(family):
    model, plain = drawn(family)
    assert sum(isinstance(module, LeanNorm) for module in model.modules()) >= 7
    assert sum(isinstance(module, LeanMlp) for module in model.modules()) == 3
    expected, gradients, much = scored(plain, pack())
    found, own, little = scored(model, pack())
    assert torch.equal(found, expected)
    assert_close(own, gradients)
    of_a_layer = 4 * SHAPE["hidden_size"] + 2 * SHAPE["intermediate_size"]  # numbers a token: of two norms and the MLP
    assert much - little > 0.95 * 4 * 3 * pack().num_computed * of_a_layer


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision(family):
    model, plain = drawn(family)
    expected, gradients, much = scored(plain, pack(), torch.bfloat16)
    found, own, little = scored(model, pack(), torch.bfloat16)
    assert torch.equal(found, expected)
    assert_close(own, gradients, 0.05)
    assert little < 0.8 * much


def test_a_small_mlp_takes_blocks_of_rows():
    model, plain = drawn("llama")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear  # as where oneDNN is preferred
    what = pack((900, 300, 150))
    rows = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[-2]))
    expected, gradients, much = scored(plain, what)
    found, own, little = scored(model, what)
    assert max(rows) == lean._ROWS and len(rows) == 3
    torch.testing.assert_close(found, expected)
    assert_close(own, gradients)
    assert little < 0.7 * much


def test_a_large_mlp_takes_all_rows_at_once(monkeypatch):
    monkeypatch.setattr(lean, "_SMALL", 32 * 96 - 1)
    model, _ = drawn("llama")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear
    rows = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[-2]))
    scored(model, pack((900, 300)))
    assert len(rows) == 1 and rows[0] >= 1198


def test_adapters_on_a_frozen_base():
    model, plain = drawn("qwen3")
    for one in (model, plain):
        torch.manual_seed(1)
        add_lora(one, LoraSection(rank=4))
        for parameter in one.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.1)
    expected, gradients, much = scored(plain, pack())
    found, own, little = scored(model, pack())
    assert torch.equal(found, expected)
    assert_close(own, gradients)
    assert little < 0.8 * much


def test_what_was_made_again_is_dropped():
    model, _ = drawn("llama")
    logprobs, _, _ = scored(model, pack())
    with torch.no_grad():
        assert torch.equal(packed_logprobs(model, pack(), 1.0).logprobs, logprobs)
    assert lean._known.get() is None
    model.zero_grad()
    scores = packed_logprobs(model, pack(), 1.0).logprobs.sum()
    scores.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    scores.backward()
    assert_close({n: p.grad for n, p in model.named_parameters()}, first)


def test_other_formulas_are_left_as_they_are():
    gemma = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8))
    gelu = FAMILIES["llama"](hidden_act="gelu")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4))
    for model in (gemma, gelu, gpt2):
        make_lean(model)
    assert not any(isinstance(module, (LeanNorm, LeanMlp)) for module in (*gemma.modules(), *gpt2.modules()))
    assert not any(isinstance(module, LeanMlp) for module in gelu.modules())
    assert all("forward" not in vars(module) for module in gpt2.modules())
