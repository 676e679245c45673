"""One tokenizer for all teams."""

from __future__ import annotations

import pytest

from astraflow.models.chat import ChatTokenizer
from astraflow.models.registry import model_directory


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(model_directory("tiny-char", tmp_path_factory.mktemp("models"), 0))
