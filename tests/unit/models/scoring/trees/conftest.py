"""Random trees of sequences, tries of real calls, and small decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config

import astraflow.models.scoring.trees.tokens as tokens
from astraflow.rollout.context.trie import trajectories
from astraflow.types import Call, Episode, Generation, Task

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 8,
}  # fmt: skip


@pytest.fixture
def every_stretch() -> Iterator[None]:
    """Whatever is shared is read as a stretch, however short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "WORTH_TOKENS", 1)
        yield


@pytest.fixture
def make_decoder() -> Callable[[str], PreTrainedModel]:
    """Weights far from flat, so that positions matter."""

    def make(family: str) -> PreTrainedModel:
        torch.manual_seed(0)
        config = {
            "qwen3": lambda: Qwen3Config(**SHAPE),
            "llama": lambda: LlamaConfig(**SHAPE),
            "window": lambda: MistralConfig(**SHAPE, sliding_window=7),
        }[family]()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4.0)
        return model

    return make


@pytest.fixture
def forked_episode() -> Episode:
    """A history, forks of it, forks of those, a retry, two equal replies and another root, as the trie has them."""
    draw = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return draw.integers(3, 61, count).astype(np.int32)

    calls: list[Call] = []

    def ask(prompt: np.ndarray, reply: np.ndarray | None = None) -> np.ndarray:
        said = ids(int(draw.integers(2, 9))) if reply is None else reply
        numbers = np.zeros(len(said), np.float32)
        calls.append(Call("actor", len(calls), prompt, Generation(said, numbers, numbers.astype(np.int32), "stop")))
        return np.concatenate((prompt, said))

    history = ids(24)
    for _ in range(3):
        history = np.concatenate((ask(history), ids(4)))
    forks = [ask(np.concatenate((history, ids(3)))) for _ in range(4)]
    deeper = [ask(np.concatenate((fork[: len(fork) - 2], ids(2)))) for fork in forks[:2] for _ in range(2)]
    for _ in range(3):
        ask(np.concatenate((deeper[0], ids(5))))
    ask(history)
    again = ids(5)
    ask(history, again)
    ask(history, again)
    ask(ids(9))
    branches = trajectories(calls, "actor", 1.0)
    assert len(branches) > 9 and any(b.parent_branch > 0 for b in branches)
    return Episode(
        episode_id="train/0/0/0", attempt=1, node_id="n", task=Task("train", 0, 0, {}), trajectories=branches
    )  # fmt: skip
