"""The base of an adapter in 4 bits a weight (QLoRA): linear layers hold 16 levels and a scale for each 64 weights.

    model directory ─► weights rounded to what 4 bits can say, as a model directory ─► trainer: packed, bit for bit
                                                                                  └──► engines: as any other model

The levels are NF4 (Dettmers et al. 2023, arXiv:2305.14314, appendix E), the scales bfloat16 and not quantised again, so
that a rounded weight is a bfloat16 number: it is the same in each dtype of an engine, and rounding it again changes
nothing. 4.25 bits a weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.linear import product
from astraflow.models.load import load_model, stored_tensors

BLOCK = 64
_BESIDE = frozenset((".json", ".jinja", ".txt", ".model"))
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is packed and fixed; made out of one by `pack_linears`."""

    codes: torch.Tensor  # [M K / 2] uint8, two levels each, the first one in the high bits
    scales: torch.Tensor  # [M K / BLOCK] bfloat16

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.reshape(-1, self.in_features).to(dtype)
        output: torch.Tensor = _Product.apply(rows, self.codes, self.scales, self._shape)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(dtype)
        return output.view(*input.shape[:-1], self.out_features)

    def unpacked(self) -> torch.Tensor:
        """The weight [M, K], float32."""
        return unpack(self.codes, self.scales, self._shape, torch.float32)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


class _Product(torch.autograd.Function):
    """`rows @ weight.T`; the weight is unpacked for it, here and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return product(rows, unpack(codes, scales, shape, rows.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        upstream = gradients[0].contiguous()
        codes, scales = ctx.saved_tensors
        weight = unpack(codes, scales, ctx.shape, upstream.dtype)
        return product(upstream, weight.t()), None, None, None


def pack_linears(model: PreTrainedModel) -> None:
    """Pack the linear layers of a rounded model, in place, but for its output layer; those that are stay so.

    Raises: ModelError: a weight is not one that 4 bits can say.
    """
    for name, layer in _linears(model).items():
        if isinstance(layer, Nf4Linear):
            continue
        weight = layer.weight.detach()
        codes, scales = pack(weight)
        if not torch.equal(unpack(codes, scales, layer.weight.shape, torch.float32), weight.float()):
            raise ModelError(
                "lora.quantize", "nf4", f"finds other weights in {name} than it has written",
                "delete the nf4 directories of the model cache; they are made again",
            )  # fmt: skip
        del layer._parameters["weight"]
        layer.__class__ = Nf4Linear
        layer.register_buffer("codes", codes, persistent=False)
        layer.register_buffer("scales", scales, persistent=False)


@torch.no_grad()
def write_rounded(directory: Path, source: Path) -> None:
    """The model of `source` as a directory, its linear layers rounded to what 4 bits can say.

    Raises: ModelError: it cannot be loaded, or has no linear layers.
    """
    model = load_model(source)
    linears = _linears(model)
    if not linears:
        raise ModelError(
            "lora.quantize", "nf4", f"finds no linear layers in {type(model).__name__}", "leave it out for this model"
        )
    for layer in linears.values():
        layer.weight.copy_(unpack(*pack(layer.weight), layer.weight.shape, torch.float32))
    if _stored_dtype(source) == torch.bfloat16:
        model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(directory)
    for file in source.iterdir():
        if file.suffix in _BESIDE and not file.name.endswith(".index.json") and not (directory / file.name).exists():
            (directory / file.name).write_bytes(file.read_bytes())


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest level of each weight over the largest one of its block. [M, K] -> codes and scales, see `Nf4Linear`."""
    flat = weight.float().reshape(-1)
    blocks = pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).to(torch.bfloat16)
    _, between, _ = _tables(weight.device)
    relative = blocks / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    nearest = torch.bucketize(relative.view(-1), between).to(torch.uint8)
    return (nearest[0::2] << 4) | nearest[1::2], scales


def unpack(codes: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `pack`: `shape` in `dtype`, rounded to bfloat16."""
    _, _, pairs = _tables(codes.device)
    blocks = pairs.index_select(0, codes.int()).view(-1, BLOCK).mul_(scales.float()[:, None])
    return blocks.to(torch.bfloat16).to(dtype).view(-1)[: math.prod(shape)].view(*shape)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The levels, what lies halfway between two of them, and both levels of each code [256, 2]."""
    levels = torch.tensor(_LEVELS, device=device)
    return levels, (levels[1:] + levels[:-1]) / 2, torch.cartesian_prod(levels, levels)


def _stored_dtype(directory: Path) -> torch.dtype:
    """Of the first matrix."""
    return next(tensor.dtype for _, tensor in stored_tensors(directory) if tensor.ndim == 2)


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
