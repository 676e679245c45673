"""Linear layers with a second copy of their weight in the layout of oneDNN's kernels, on a CPU.

Without it, oneDNN brings the weight into that layout in every call, which for the few rows of a decode step takes about
as long as the product.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.models.linear import FastLinear, has_bfloat16, pays, prefers_onednn
from astraflow.models.load import state_tensors

_ROWS = 512  # for which the layout is chosen: as good as any for the few rows of a step, and best for many


class PackedLinear(FastLinear):
    """A linear layer that uses its packed copy, once `pack` made one; no gradient."""

    packed: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        rows = input.reshape(-1, self.in_features)
        small = input.dtype == torch.float32 and not pays(len(rows), self.weight)
        if self.packed is None or small or not len(rows):
            return super().forward(input)
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return output.view(*input.shape[:-1], self.out_features)


def pack(model: PreTrainedModel) -> None:
    """Copy the weights of all linear layers afresh, where this CPU gains by it: after each change of them."""
    if not _gains(model):
        return
    for module in model.modules():
        if type(module) in (nn.Linear, FastLinear):
            module.__class__ = PackedLinear
        if isinstance(module, PackedLinear):
            module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), _ROWS)


def held_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """`state_tensors`, and every packed copy that differs from its weight, under a name that no weight has."""
    found = state_tensors(model)
    differ = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear) and module.packed is not None:
            copy = module.packed.to_dense()
            if not torch.equal(copy, module.weight):
                differ[f"{name}.packed"] = copy
    return found | differ


def _gains(model: PreTrainedModel) -> bool:
    if model.device.type != "cpu":
        return False
    if model.dtype == torch.float32:
        return prefers_onednn()
    return model.dtype == torch.bfloat16 and has_bfloat16()
