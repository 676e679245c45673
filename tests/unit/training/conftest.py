"""Tiny models and made-up batches."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astraflow.models.scoring.packing import rows_from_table
from astraflow.models.tiny_char import write_tiny_char
from astraflow.wire.codec import TRAINING_SCHEMA

IDS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = IDS | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**IDS, n_positions=512, n_embd=32, n_layer=2, n_head=4)),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def make_model():
    """Model of a family with large enough random weights that positions matter."""

    def make(family="qwen3"):
        model = FAMILIES[family]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6.0)
        return model

    return make


@pytest.fixture(scope="session")
def tiny_char(tmp_path_factory):
    """The built-in character model as a directory."""
    directory = tmp_path_factory.mktemp("model") / "tiny-char"
    write_tiny_char(directory, 0)
    return directory


@pytest.fixture
def make_table():
    """A batch from rows of (token_ids, loss_mask) and optional columns by name."""

    def make(rows, **columns):
        tokens = [np.asarray(ids, dtype=np.int32) for ids, _ in rows]
        masks = [np.asarray(mask, dtype=bool) for _, mask in rows]
        size = len(rows)
        values = {
            "episode_id": [f"train/0/0/{i}" for i in range(size)],
            "attempt": [1] * size,
            "group_id": ["train/0/0"] * size,
            "source": ["train"] * size,
            "row": [0] * size,
            "epoch": [0] * size,
            "policy": ["actor"] * size,
            "branch": [0] * size,
            "parent_branch": [-1] * size,
            "fork_at": [0] * size,
            "token_ids": tokens,
            "loss_mask": [mask.tolist() for mask in masks],
            "behavior_logprobs": [np.where(mask, -1.0, 0.0).astype(np.float32) for mask in masks],
            "versions": [np.where(mask, 0, -1).astype(np.int32) for mask in masks],
            "call_index": [np.where(mask, 0, -1).astype(np.int16) for mask in masks],
            "reward": [1.0] * size,
            "rewards_per_call": [[] for _ in range(size)],
            "finish_reason": ["stop"] * size,
            "truncated": [False] * size,
            "advantages": [np.where(mask, 1.0, 0.0).astype(np.float32) for mask in masks],
            "weight": [1.0] * size,
            "engine": [""] * size,
        }
        values |= columns
        arrays = [pa.array(values[field.name], field.type) for field in TRAINING_SCHEMA]
        return pa.table(arrays, schema=TRAINING_SCHEMA)

    return make


@pytest.fixture
def random_rows():
    """`lengths` -> rows of random ids of which about half, never the first, are sampled."""

    def make(lengths, seed=0):
        generator = np.random.default_rng(seed)
        rows = []
        for length in lengths:
            mask = generator.random(length) < 0.5
            mask[0], mask[-1] = False, True
            rows.append((generator.integers(3, 61, length), mask))
        return rows

    return make


@pytest.fixture
def batch(make_table, random_rows):
    """16 uneven rows, sampled at versions 3 to 5, with logprobs near those of an untrained model."""
    generator = np.random.default_rng(1)
    listed = random_rows([5, 40, 12, 12, 33, 7, 9, 21, 64, 3, 17, 12, 28, 50, 6, 11])
    return rows_from_table(
        make_table(
            listed,
            behavior_logprobs=[generator.normal(-4, 0.6, len(ids)).astype(np.float32) for ids, _ in listed],
            advantages=[np.full(len(ids), generator.normal(), np.float32) for ids, _ in listed],
            versions=[np.where(mask, 3 + i % 3, -1).astype(np.int32) for i, (_, mask) in enumerate(listed)],
            weight=[1.0 if i % 4 else 0.5 for i in range(len(listed))],
        )
    )
