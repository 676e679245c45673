"""float32 matrix products on CPUs where oneDNN is faster than MKL, which torch uses for them.

MKL keeps its AVX-512 kernels to one vendor's CPUs; on the others it runs at less than half the speed (98 against 240
GFLOP/s on one core, docs/performance.md). bfloat16 products go through oneDNN in torch anyway. The choice depends on
the CPU alone, so a run resumed on the same machine computes the same bits.

oneDNN compiles a kernel for each shape it meets. Rows are therefore padded to a multiple of `ROWS`, so that the few
hundred shapes of a run stay in its cache; callers that can should bring such a number of rows and save the copy. The
few rows of a decode step are padded to a multiple of `_STEP` only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

ROWS = 64
_FEW_ROWS, _STEP = 128, 8
_SMALL = 1 << 21  # products of two numbers below which a call costs more than the kernel saves
_CHUNK = 512  # rows of one partial weight gradient: their transposes stay in the cache


@cache
def has_onednn() -> bool:
    """This CPU has AVX-512, and torch the operators."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and "mkldnn::_linear_pointwise" in {str(schema.name) for schema in torch._C._jit_get_all_schemas()}
    )


@cache
def has_bfloat16() -> bool:
    """oneDNN multiplies numbers of bfloat16 fast here, where torch's own kernels are many times slower."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def prefers_onednn() -> bool:
    """In float32 too: this CPU is not of the vendor that MKL is made for."""
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in vendor and has_onednn()


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`rows @ weight.T`, without gradient. rows [N, K], weight [M, K]; fast when both are float32 on the CPU."""
    count = rows.shape[0]
    if not pays(count, weight) or not _is_fast(rows, weight):
        return linear(rows, weight)
    extra = 0 if count <= _STEP else -count % (_STEP if count < _FEW_ROWS else ROWS)
    whole = pad(rows, (0, 0, 0, extra)) if extra else rows
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(whole, weight, None, "none", [], "")
    return result[:count] if extra else result


def speed_up_linears(model: nn.Module) -> None:
    """Let the linear layers of `model` use `product` where this CPU gains by it. State dict and results stay."""
    if prefers_onednn():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FastLinear


class FastLinear(nn.Linear):
    """nn.Linear over `product`; everything else than float32 on the CPU goes the usual way."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., M]."""
        weight = self.weight
        if (
            torch.is_autocast_enabled("cpu")
            or not _is_fast(input, weight)
            or not pays(input.numel() // weight.shape[1], weight)
        ):
            return linear(input, weight, self.bias)
        rows = input.reshape(-1, weight.shape[1])
        needs_gradient = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
        output = _Product.apply(rows, weight) if needs_gradient else product(rows, weight)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weight = ctx.saved_tensors
        upstream = gradients[0].contiguous()
        to_rows = product(upstream, weight.t()) if ctx.needs_input_grad[0] else None
        to_weight = weight_gradient(upstream, rows) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight


def weight_gradient(upstream: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`upstream.T @ rows`. upstream [N, M], rows [N, K] -> [M, K]."""
    if not _is_fast(upstream, rows):
        return upstream.t() @ rows
    total: torch.Tensor | None = None
    for start in range(0, rows.shape[0], _CHUNK):
        left, right = upstream[start : start + _CHUNK], rows[start : start + _CHUNK]
        if left.shape[0] % ROWS:
            part = left.t() @ right
        else:
            part = torch.ops.mkldnn._linear_pointwise(left.t(), right.t(), None, "none", [], "")
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def pays(count: int, weight: torch.Tensor) -> bool:
    """Whether a float32 product of so many rows is large enough for oneDNN."""
    return count * weight.numel() >= _SMALL


def _is_fast(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    return prefers_onednn() and rows.dtype == weight.dtype == torch.float32 and not rows.is_cuda and rows.shape[0] > 0
