"""A model spread over the ranks by FSDP2, as a function of packs.

    weights  [rank 0's part | rank 1's part | ...]  ─ a layer gathers its own, computes, drops them ─►  gradients are
                                                                                  added up and stay with the parts

No rank holds more than its part and one layer. Gradients are sums over ranks, not means: the coefficients of a loss
have the sizes of the whole update in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from astraflow.models.load import state_tensors
from astraflow.models.scoring.forward import PackedPolicy, Scores
from astraflow.models.scoring.packing import Pack


class ShardedPolicy:
    """Call it on all ranks at once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._policy = model, PackedPolicy(model)
        mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
        layers = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh)
        fully_shard(self._policy, mesh=mesh)  # what is in no layer: embeddings, last norm, head
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it adds

    def __call__(self, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None) -> Scores:
        """See `Scoring`. `weights`: this rank's parts; without gradient only."""
        with self._under(weights or {}):
            scores: Scores = self._policy(pack, temperature)
            if not torch.is_grad_enabled():
                self._drop_gathered()
        return scores

    def _drop_gathered(self) -> None:
        """FSDP keeps what the outermost module gathered for a backward pass: without one it would be used again after
        the next optimizer step."""
        assert isinstance(self._policy, FSDPModule)
        self._policy.reshard()

    @contextlib.contextmanager
    def _under(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        if not weights:
            yield
            return
        own = state_tensors(self._model)
        kept = {name: own[name].clone() for name in weights}
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
            try:
                yield
            finally:
                for name, tensor in kept.items():
                    own[name].copy_(tensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this rank has a part; on all ranks at once."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
