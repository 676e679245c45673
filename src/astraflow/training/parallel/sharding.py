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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from astraflow.models.load import state_tensors
from astraflow.models.scoring.forward import PackedPolicy, Scores
from astraflow.models.scoring.packing import Pack
from astraflow.models.scoring.team import ALONE
from astraflow.models.stored import check_parts
from astraflow.training.parallel.loading import Stored, fill
from astraflow.training.parallel.ranks import Ranks
from astraflow.training.parallel.team import TeamOfRanks
from astraflow.training.parallel.tensor import check_plan, split_linears


class ShardedPolicy:
    """Call it on all ranks at once."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks, stored: Stored | None = None) -> None:
        """`stored`: what a model without memory is filled from.

        Raises: ModelError: it cannot be computed by teams of that size.
        """
        check_parts(model.config.to_dict(), ranks.tensor, ranks.context)
        if ranks.tensor > 1:
            check_plan(model)
        meshes = ranks.meshes(model.device.type if stored is None else stored.device.type)
        team = TeamOfRanks(meshes.team, meshes.context) if meshes.team.size() > 1 else ALONE
        self._model, self._policy = model, PackedPolicy(model, team)
        cut = split_linears(model, meshes.tensor) if ranks.tensor > 1 else set()
        layers = set(model._no_split_modules or ())
        for layer in model.modules():
            if type(layer).__name__ in layers:
                fully_shard([module for module in layer.modules() if module in cut] or [layer], mesh=meshes.parts)
        fully_shard(self._policy, mesh=meshes.ranks)  # what is in none of these: embeddings, last norm, head
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it adds
        register_fsdp_forward_method(self._policy, "itself")
        if stored is not None:
            fill(model, stored)
            assert isinstance(self._policy, FSDPModule)
            self._policy.unshard()  # FSDP takes over the new memory before anybody looks at it
            self._policy.reshard()

    def __call__(self, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None) -> Scores:
        """See `Scoring`. `weights`: this rank's parts, or whole; without gradient only."""
        with self._under(weights or {}):
            scores: Scores = self._policy(pack, temperature)
            if not torch.is_grad_enabled():
                self._drop_gathered()
        return scores

    @torch.no_grad()
    def itself(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scoring`. Not with linear layers in parts."""
        logits: torch.Tensor = self._policy.itself(token_ids)
        self._drop_gathered()
        return logits

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
                own[name].copy_(_part(tensor, own[name]))
            try:
                yield
            finally:
                for name, tensor in kept.items():
                    own[name].copy_(tensor)


@torch.no_grad()
def load_parts(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's part of whole `tensors` into the model in place."""
    for name, own in state_tensors(model).items():
        own.copy_(_part(tensors[name], own))


def _part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def clipped_parts(model: nn.Module, most: float) -> torch.Tensor:
    """As `clip_grad_norm_`, of gradients that lie over several meshes."""
    by_mesh: dict[DeviceMesh, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter.grad)
    norms = [whole(nn.utils.get_total_norm(own)) for own in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    for own in by_mesh.values():
        for gradient in own:
            assert isinstance(gradient, DTensor)
            gradient.to_local().mul_(scale)
    return norm


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this rank has a part; on all ranks at once."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
