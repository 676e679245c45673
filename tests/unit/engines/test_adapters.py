"""An engine that gets adapters: on its own base only, and only while that is still there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from astraflow.config.schema import LoraSection
from astraflow.engines.local import LocalEngine
from astraflow.errors import ModelError
from astraflow.models.load import content_checksum, load_model, state_tensors
from astraflow.models.lora.layers import add_lora, lora_tensors, peft_names
from astraflow.types import Adapter


@pytest.fixture
def engine(endless_dir: Path) -> Iterator[LocalEngine]:
    made = LocalEngine(endless_dir)
    yield made
    made.close()


@pytest.fixture
def tensors(endless_dir: Path) -> dict[str, torch.Tensor]:
    model = load_model(endless_dir)
    add_lora(model, LoraSection(rank=2))
    return peft_names(lora_tensors(model))


def test_an_adapter_of_another_base_is_refused_by_name(engine: LocalEngine, llama_dir: Path, tensors) -> None:
    before = engine.effective_weights().result(60)
    adapter = Adapter(1.0, content_checksum(llama_dir))
    with pytest.raises(ModelError, match=f"adapter base={adapter.base} is not the model here"):
        engine.load_weights(1, tensors, adapter).result(60)
    assert engine.effective_weights().result(60) == before


def test_after_a_whole_version_there_is_no_base_any_more(engine: LocalEngine, endless_dir: Path, tensors) -> None:
    adapter = Adapter(1.0, content_checksum(endless_dir))
    assert engine.load_weights(1, tensors, adapter).result(60) == 1
    engine.load_weights(2, state_tensors(load_model(endless_dir))).result(60)
    with pytest.raises(ModelError, match="a whole version took its place"):
        engine.load_weights(3, tensors, adapter).result(60)
    assert engine.version == 2


def test_an_adapter_is_not_taken_for_a_whole_version(engine: LocalEngine, tensors) -> None:
    with pytest.raises(ModelError, match="is not a weight of this model"):
        engine.load_weights(1, tensors).result(60)


def test_a_whole_version_that_was_refused_leaves_the_base(engine: LocalEngine, endless_dir: Path, tensors) -> None:
    adapter = Adapter(1.0, content_checksum(endless_dir))
    assert engine.load_weights(1, tensors, adapter).result(60) == 1
    whole = state_tensors(load_model(endless_dir))
    with pytest.raises(ModelError, match="are missing"):
        engine.load_weights(2, dict(list(whole.items())[:-1])).result(60)
    assert engine.load_weights(3, tensors, adapter).result(60) == 3
