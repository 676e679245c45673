"""Weights from a file that the node wrote into shared memory: the whole model, layer by layer.

The node keeps its copy of the weights in that file and applies deltas to it there; what a server gets is always whole
and was verified before. vLLM packs weights for its kernels when it loads them, so changing them in place is no way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from astraflow.engines.vllm.inside.sampler import install


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing has to be agreed."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the weights are, by Hugging Face name."""

    path: str


class FileTransfer(WeightTransferEngine[FileInit, FileUpdate]):
    """Backend `astraflow` of vLLM's weight transfer."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, *arguments: Any) -> None:
        """Made in each worker of a server that is ours, before it samples."""
        super().__init__(*arguments)
        install()

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing has to be opened."""

    def start_weight_update(self) -> None:
        """Layers wait for their new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load every tensor of the file; a tensor-parallel worker takes its own part of each."""
        self.model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        """Layers that were not complete by themselves are made ready.

        An output layer that is tied to the embedding loads nothing, so vLLM 0.32 leaves it the kernel that a CPU made
        of the weights before: it is made anew.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and "cpu_linear" in vars(module):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            yield name, file.get_tensor(name)
