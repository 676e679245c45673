"""Decoders that keep less for the backward pass. What they compute stays the same to the bit, forwards.

| of a layer                      | transformers keeps, numbers a token          | kept here       |
|---------------------------------|----------------------------------------------|-----------------|
| each RMSNorm of width H         | 3 H: input, input over its root mean square, output | H: input |
| MLP of width I, SiLU(gate) * up | 4 I: gate, up, SiLU(gate) and the product    | 2 I: gate and up |

What is missing is made again by a few element-wise operations, when the backward pass first asks for it. Where an MLP
is small it takes a block of rows after the other, so that what it needs for a moment is small and stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from astraflow.models.linear import FastLinear

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")
NORMS = frozenset(f"{family}RMSNorm" for family in _FAMILIES)
MLPS = frozenset(f"{family}MLP" for family in _FAMILIES)
"""transformers' classes whose formulas are those of this file."""
_ROWS = 512  # of a block; as many as a partial gradient of weights has (models/linear.py)
_SMALL = 1 << 18  # numbers of a matrix that is worth reading again for each block: 1 MB


def make_lean(model: PreTrainedModel) -> None:
    """Let the layers of `model` that are known here keep less, in place. Does nothing the second time."""
    for module in model.modules():
        kind = type(module)
        if not kind.__module__.startswith("transformers.models."):
            continue
        if kind.__name__ in NORMS:
            module.__class__ = LeanNorm
            cast(LeanNorm, module).kernel = rms_norm
        elif kind.__name__ in MLPS and isinstance(module.act_fn, (SiLUActivation, nn.SiLU)):
            module.__class__ = LeanMlp
            cast(LeanMlp, module).kernel = gated
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer) or "forward" in vars(layer):
            continue
        if any(isinstance(module, (LeanNorm, LeanMlp)) for module in layer.modules()):
            layer.forward = partial(_inside_layer, layer.forward)  # the module's hooks (FSDP2's too) stay outside


class LeanNorm(nn.Module):
    """x / rms(x) * weight."""

    weight: nn.Parameter
    variance_epsilon: float
    kernel: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # (x, weight, eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        output = self.kernel(hidden_states, self.weight, self.variance_epsilon)
        _Again.of(output, partial(self.kernel, hidden_states.detach(), self.weight.detach(), self.variance_epsilon))
        return output


class LeanMlp(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (gate, up)
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        if not self._is_small() or x.shape[-2] <= _ROWS:
            return self._rows(x)
        return torch.cat([self._rows(part) for part in torch.split(x, _ROWS, -2)], -2)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        inner = self.kernel(gate, up)
        _Again.of(inner, partial(self.kernel, gate.detach(), up.detach()))
        return cast(torch.Tensor, self.down_proj(inner))

    def _is_small(self) -> bool:
        layer = self.gate_proj
        return isinstance(layer, FastLinear) and type(layer.weight) is nn.Parameter and layer.weight.numel() <= _SMALL


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        normed = (x.float() * scale).to(x.dtype)
        return normed.mul_(weight) if normed.dtype == weight.dtype else weight * normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x s, s = 1 / rms(x): dw = sum(dy n), dx = s (dy w - n mean(dy w n))."""
        x, weight, scale = ctx.saved_tensors
        upstream = gradients[0]
        normed = x.float() * scale
        by_rows = upstream * normed.to(x.dtype)
        to_weight = by_rows.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, None
        drag = (by_rows.float() @ weight.float()).div_(x.shape[-1])[..., None]
        to_x = (upstream * weight).float().addcmul_(normed, drag, value=-1.0).mul_(scale).to(x.dtype)
        return to_x, to_weight, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension. [..., D], weight [D]. Source: RMSNorm, arXiv:1910.07467."""
    return cast(torch.Tensor, _Norm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        to_gate = gradients[0] * up
        torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
        return to_gate, silu(gate).mul_(gradients[0])


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up, both [..., D]. Source: SwiGLU, arXiv:2002.05202."""
    return cast(torch.Tensor, _Gated.apply(gate, up))  # type: ignore[no-untyped-call]


class _Again:
    """A tensor that operations inside one layer would keep for the backward pass, and how it is made again instead."""

    def __init__(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        self._first: torch.Tensor | None = tensor  # until the layer ends: its address stays its own
        self._make, self._users = make, 0
        self._made: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        """Those who use `tensor`, contiguous and alone in its memory, in this layer need not keep it."""
        known = _known.get()
        if known is not None and tensor.requires_grad:
            known[tensor.untyped_storage().data_ptr()] = cls(tensor, make)

    def kept(self, saved: torch.Tensor) -> _Kept:
        """What is kept in place of `saved`, all of the tensor or rows of it."""
        self._users += 1
        return _Kept(self, int(saved.storage_offset()), saved.shape)

    def part(self, kept: _Kept) -> torch.Tensor:
        """As it was; the last user drops it."""
        made = self._make() if self._made is None else self._made
        self._users -= 1
        self._made = made if self._users else None
        return made.view(-1).narrow(0, kept.offset, kept.shape.numel()).view(kept.shape)

    def end(self) -> None:
        """The layer has ended."""
        self._first = None


class _Kept(NamedTuple):
    again: _Again
    offset: int
    shape: torch.Size


_known: ContextVar[dict[int, _Again] | None] = ContextVar("_known", default=None)
"""By address, of the layer that is computed now; None: there is none, or nothing is kept."""


def _inside_layer(inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inside(*args, **kwargs)
    known: dict[int, _Again] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor | _Kept:
        plain = type(saved) is torch.Tensor and saved.is_contiguous()
        again = known.get(saved.untyped_storage().data_ptr()) if plain else None
        return saved if again is None else again.kept(saved)

    def unpack(kept: torch.Tensor | _Kept) -> torch.Tensor:
        return kept.again.part(kept) if isinstance(kept, _Kept) else kept

    outside = _known.set(known)
    try:
        with saved_tensors_hooks(pack, unpack):
            return inside(*args, **kwargs)
    finally:
        _known.reset(outside)
        for again in known.values():
            again.end()
