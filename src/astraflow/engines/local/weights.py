"""The live model's weights: a whole version is copied into it, an adapter is merged with the base it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from astraflow.engines.local.compute.packed import held_tensors
from astraflow.errors import ModelError
from astraflow.models.load import content_checksum, dtype_name, effective_checksum, load_tensors
from astraflow.models.lora.merge import load_adapter
from astraflow.types import Adapter, EffectiveWeights


class Base:
    """What a model directory holds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checksum = ""  # once an adapter asks

    def check(self, adapter: Adapter) -> None:
        """Raises: ModelError: the adapter was made for another base."""
        self._checksum = self._checksum or content_checksum(self._directory)
        if adapter.base != self._checksum:
            raise ModelError(
                "adapter base", adapter.base, f"is not the model here ({self._checksum}, {self._directory})",
                "give trainer and engine the same model directory",
            )  # fmt: skip


class LiveWeights:
    """Of one model; only the engine's thread calls it."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        """`model` as it was loaded from `directory`."""
        self._model, self._directory = model, Base(directory)
        # The base's own weights where adapters changed them; None: a whole version took the base's place.
        self._base: dict[str, torch.Tensor] | None = {}

    def load(self, tensors: Mapping[str, torch.Tensor], adapter: Adapter | None) -> None:
        """A version takes the place of the one before. Raises: ModelError: it does not fit; nothing was changed."""
        if adapter is None:
            load_tensors(self._model, tensors)
            self._base = None
            return
        if self._base is None:
            raise ModelError(
                "adapter base", adapter.base, "is gone, a whole version took its place",
                "publish whole versions or adapters, not both; start this engine again",
            )  # fmt: skip
        self._directory.check(adapter)
        load_adapter(self._model, tensors, adapter.scaling, self._base)

    def effective(self, version: int) -> EffectiveWeights:
        """What the model computes with, as `version`."""
        return EffectiveWeights(version, dtype_name(self._model.dtype), effective_checksum(held_tensors(self._model)))
