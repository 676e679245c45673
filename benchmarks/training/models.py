"""The models that `bench_training` measures with, as directories."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow.config.env import cache_dir
from astraflow.models.registry import model_directory
from astraflow.models.tiny_char import make_config

POSITIONS = 8192


def tiny(place: Path, vocabulary: int = 0) -> Path:
    """The quickstart's model with room for long sequences, and for a larger vocabulary if one is given."""
    config = make_config()
    size = vocabulary or config.vocab_size
    shape: Qwen3Config = type(config).from_dict(
        config.to_dict() | {"vocab_size": size, "max_position_embeddings": POSITIONS}
    )
    target = place / f"tiny-{size}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(shape).save_pretrained(target)
    return target


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, from the cache or its package."""
    return model_directory("smollm2-135m-instruct", cache_dir(), 0)
