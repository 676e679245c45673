"""Small random models on disk: with an EOS that pads too, without any EOS, and of two architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astraflow.models.load import load_model, state_tensors

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "initializer_range": 0.3,
}  # fmt: skip


def write_model(directory: Path, kind: str, eos: int | None, seed: int = 0) -> Path:
    """A random model whose distributions are neither flat nor certain; pad equals EOS."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": eos}
    model: PreTrainedModel
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **ids, tie_word_embeddings=True))
    elif kind == "gpt2":
        settings = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
        model = GPT2LMHeadModel(GPT2Config(**settings, **ids, n_positions=64))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **ids, tie_word_embeddings=False))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def endless_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 without EOS: generations end by length only."""
    return write_model(tmp_path_factory.mktemp("endless"), "qwen3", None)


@pytest.fixture(scope="session")
def eos_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 with EOS 2, which is also the pad id."""
    return write_model(tmp_path_factory.mktemp("eos"), "qwen3", 2)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama, untied, without EOS."""
    return write_model(tmp_path_factory.mktemp("llama"), "llama", None)


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2: learned positions, 64 of them; no EOS."""
    return write_model(tmp_path_factory.mktemp("gpt2"), "gpt2", None)


@pytest.fixture
def tensors(endless_dir: Path) -> dict[str, torch.Tensor]:
    """The weights of `endless_dir`."""
    return state_tensors(load_model(endless_dir))
