"""The model families that every invariant of the numbers is tested on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from astraflow.models.tiny_char import make_tokenizer


@pytest.fixture(params=["llama", "qwen3", "gpt2", "mistral"])
def family(request: pytest.FixtureRequest) -> str:
    """An untied head; a tied one, norms of queries and keys; learned positions, dropout, Conv1D, biases; a window."""
    return str(request.param)


@pytest.fixture
def model(make_model: Callable[[str], PreTrainedModel], family: str) -> PreTrainedModel:
    """Random float32 weights, transformers' own attention."""
    return make_model(family)


@pytest.fixture
def directory(model: PreTrainedModel, tmp_path: Path) -> Path:
    """`model` on disk, with a tokenizer."""
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"
