"""An adapter and its base become ordinary weights: once per version, so that a decode step costs what it costs without.

Trainer and engine call the same function. Products and sum are taken in float64 and rounded once, to the dtype of the
base: kernels may add the few terms of a product in any order, which float64 makes invisible after the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.load import DTYPES, checksum_of, load_model, state_tensors
from astraflow.models.lora.adapter import PREFIX

_BLOCK = 1 << 20  # elements in float64 at once
_A, _B = ".lora_A.weight", ".lora_B.weight"


@torch.no_grad()
def merge_pair(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """A new tensor `weight + scaling * b @ a`. weight [M, K], a [R, K], b [M, R]."""
    merged = torch.empty_like(weight)
    right = a.to(weight.device, torch.float64)
    rows = max(1, _BLOCK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        left = b[part].to(weight.device, torch.float64) * scaling
        merged[part] = torch.addmm(weight[part].double(), left, right)
    return merged


def merged_weight(
    name: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor], scaling: float
) -> torch.Tensor:  # fmt: skip
    """The weight `name` of a base with the adapter `tensors` (by peft's names) on it, if that is on it."""
    layer = PREFIX + name.removesuffix(".weight")
    if layer + _A not in tensors:
        return weight
    return merge_pair(weight, tensors[layer + _A], tensors[layer + _B], scaling)


@torch.no_grad()
def load_adapter(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], scaling: float, base: dict[str, torch.Tensor]
) -> None:
    """Put an adapter on the base of `model`, in place; an adapter that was there before is gone. Nothing is changed
    unless all of it fits.

    Args: tensors: by peft's names. base: the base's own weights by name, as far as adapters changed them; it is filled.
    Raises: ModelError: a name that is no half of a pair on a weight of the model, or a shape that does not fit.
    """
    own = state_tensors(model)
    pairs = adapter_pairs(tensors, own)
    for name in base.keys() - pairs.keys():
        own[name].copy_(base[name])
    for name, (a, b) in pairs.items():
        if name not in base:
            base[name] = own[name].clone()
        own[name].copy_(merge_pair(base[name], a, b, scaling))


def adapter_pairs(
    tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by the name of the weight that they are on, out of an adapter's `tensors`. `own`: the base's weights.

    Raises: ModelError: as `load_adapter`.
    """
    return {name: _pair(name, tensors, own) for name in _layers(tensors, own)}


@torch.no_grad()
def merged_checksum(directory: Path, tensors: Mapping[str, torch.Tensor], scaling: float, dtype: str) -> str:
    """`effective_checksum` of an engine of `dtype` with this adapter on the model in `directory`.

    Raises: ModelError: the directory cannot be read.
    """
    # Loaded as an engine loads it, so that the set of tensors is the same: a file may hold tied weights twice, names of
    # another time, or leave names out. In float32, as another dtype would for a moment be torch's default, also for an
    # engine that decodes in another thread.
    own = state_tensors(load_model(directory))

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(own):
            tensor = own[name].to(DTYPES[dtype]) if own[name].is_floating_point() else own[name]
            yield name, merged_weight(name, tensor, tensors, scaling)

    return checksum_of(merged())


def _layers(tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    """The weights on which `tensors` are, each once."""
    found: dict[str, None] = {}
    for name in tensors:
        layer = name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B) + ".weight"
        if not name.startswith(PREFIX) or not name.endswith((_A, _B)) or layer not in own:
            raise ModelError(
                "adapter tensor", name, "is on no weight of this model",
                f"publish {PREFIX}<layer>{_A} and {_B} of layers of the base",
            )  # fmt: skip
        found[layer] = None
    return list(found)


def _pair(
    name: str, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = PREFIX + name.removesuffix(".weight")
    a, b = tensors.get(layer + _A), tensors.get(layer + _B)
    if a is None or b is None:
        raise ModelError("adapter", layer, "lacks one of its two matrices", f"publish {_A} and {_B}")
    want = tuple(own[name].shape)
    if a.ndim != 2 or b.ndim != 2 or (b.shape[0], a.shape[1]) != want or a.shape[0] != b.shape[1]:
        raise ModelError(
            f"adapter {layer}.shape", (tuple(a.shape), tuple(b.shape)), f"must make {want}",
            "use the same model directory for the trainer and the engine",
        )  # fmt: skip
    return a, b
