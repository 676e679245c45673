"""Models on which several adapters are trained in one process: their weights are in memory once."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from astraflow.models.load import load_model
from astraflow.models.lora.nf4 import pack_linears


class Bases:
    """Of one process; used by one thread at a time."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Path, bool, torch.device], PreTrainedModel] = {}

    def open(self, directory: Path, *, packed: bool, device: torch.device) -> PreTrainedModel:
        """A float32 model of `directory` to add an adapter to: modules of its own, weights of all such models. They are
        frozen; `packed`: in 4 bits, see `models.lora.nf4`.

        Raises: ModelError: as `load_model`.
        """
        key = (directory.resolve(), packed, device)
        base = self._loaded.get(key)
        if base is None:
            base = load_model(directory).requires_grad_(False)
            if packed:
                pack_linears(base)
            self._loaded[key] = base = base.to(device)  # type: ignore[arg-type]
        shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
        twin: PreTrainedModel = copy.deepcopy(base, shared)
        return twin
