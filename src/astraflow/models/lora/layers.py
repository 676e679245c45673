"""LoRA on the linear layers of a model, in place: names, files and forward pass of everything else stay as they are.

Source: Hu et al. 2021, arXiv:2106.09685. Why not peft's layers: docs/decisions/0007-lora.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from astraflow.config.schema import LoraSection
from astraflow.errors import ModelError
from astraflow.models.linear import FastLinear
from astraflow.models.load import state_tensors
from astraflow.models.lora.adapter import PREFIX
from astraflow.models.lora.merge import merge_pair
from astraflow.models.lora.nf4 import Nf4Linear, pack_linears
from astraflow.models.lora.targets import matching

_PAIR = ("lora_A", "lora_B")


class Adapted(nn.Linear):
    """x W' + scaling * (x A') B', bias as before. Made out of a linear layer by `add_lora`."""

    lora_A: nn.Linear  # in -> rank
    lora_B: nn.Linear  # rank -> out; zero at the start
    scaling: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        low = linear(input, self.lora_A.weight)
        return super().forward(input) + self.scaling * linear(low, self.lora_B.weight)


class LoraLinear(Adapted, FastLinear):
    """On a weight in floating point."""


class LoraNf4Linear(Adapted, Nf4Linear):
    """On a packed weight."""


def add_lora(model: PreTrainedModel, section: LoraSection) -> list[str]:
    """Freeze `model`, pack it as `section.quantize` says, and give the layers that `section.targets` names a pair of
    small matrices each.

    Returns: the last parts of these layers' names, sorted: what peft calls target modules.
    Raises: ModelError: a target that is no linear layer of the model, or its output layer; a rank that has no use.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    chosen = {name for target in section.targets for name in matching(target, linears)}
    _check_rank(section.rank, {name: linears[name] for name in chosen})
    model.requires_grad_(False)
    if section.quantize == "nf4":
        pack_linears(model)
    for name in linears:  # in the order of the model, so that a seed gives the same numbers whatever the order asked
        if name in chosen:
            _add(linears[name], section)
    return sorted({name.rpartition(".")[2] for name in chosen})


def lora_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The small matrices by their names in the model, live."""
    return {name: p.detach() for name, p in model.named_parameters() if name.rpartition(".")[0].endswith(_PAIR)}


def peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`lora_tensors` under the names that peft gives them in files."""
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


@torch.no_grad()
def load_lora(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `peft_names(lora_tensors(model))`. Raises: ModelError: other names or shapes."""
    own = peft_names(lora_tensors(model))
    different = sorted(own.keys() ^ tensors.keys()) or [n for n in own if own[n].shape != tensors[n].shape]
    if different:
        raise ModelError(
            "adapter tensor", different[0], "does not fit policies.*.lora", "use the rank and targets of the checkpoint"
        )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


@torch.no_grad()
def effective_tensors(model: PreTrainedModel, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """`state_tensors` of the base in `dtype` (None: its own) with the adapters merged: what engines compute with."""
    pairs = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, Adapted)}
    found = {}
    for name, tensor in _base_tensors(model):
        base = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        layer = pairs.get(name)
        if layer is not None:
            base = merge_pair(base, layer.lora_A.weight, layer.lora_B.weight, layer.scaling)
        found[name] = base
    return found


def _base_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    small = lora_tensors(model)
    yield from ((name, tensor) for name, tensor in state_tensors(model).items() if name not in small)
    for name, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            yield f"{name}.weight", module.unpacked()


def _check_rank(rank: int, layers: Mapping[str, nn.Linear]) -> None:
    sizes = {name: min(layer.in_features, layer.out_features) for name, layer in layers.items()}
    name = min(sorted(sizes), key=lambda each: sizes[each])
    most = sizes[name]
    if rank > most:
        raise ModelError(
            "lora.rank", rank, f"is beyond the smaller dimension of {name} ({most})",
            f"use at most {most}, or leave that layer out of lora.targets",
        )  # fmt: skip


def _add(layer: nn.Linear, section: LoraSection) -> None:
    weight = layer.codes if isinstance(layer, Nf4Linear) else layer.weight
    layer.__class__ = LoraNf4Linear if isinstance(layer, Nf4Linear) else LoraLinear
    assert isinstance(layer, Adapted)
    device = None if weight.is_meta else weight.device  # a base may get its memory later; these start now
    # float32 whatever the base is: steps of the optimizer are too small for fewer bits. A as nn.Linear starts, B zero.
    layer.lora_A = nn.Linear(layer.in_features, section.rank, bias=False, device=device, dtype=torch.float32)
    layer.lora_B = nn.Linear(section.rank, layer.out_features, bias=False, device=device, dtype=torch.float32)
    nn.init.zeros_(layer.lora_B.weight)
    layer.scaling = section.alpha / section.rank
