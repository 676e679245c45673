"""AdamW whose moments take one byte each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BLOCK = 256  # moments of a row that share a scale; rows, so that ranks that hold some of them round as one would
SMALL = 4096  # parameters with fewer numbers keep float32 moments, and so do vectors: norms and biases need them
CHUNK = 1 << 24  # numbers that are in float32 at once, or one row
_DECADES = 7


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits: a code per number, a float32 scale (the largest of them) per block of 256
    of a row. Of a parameter that ranks divide by rows each updates its own.

    Moments are float32 while they are used, so the update is AdamW's up to the rounding of the moments before. Codes
    are denser towards the largest of a block over seven decades; a second moment above 0 is never stored as 0, which
    would make its next step a leap. Parameters and gradients are float32.
    Source: Dettmers et al. 2021, arXiv:2110.02861 sections 2.1 (dynamic codes) and 2.2 (blocks).
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state |= _fresh(parameter)
                    state["step"] = (
                        state["step"].cpu() + 1
                    )  # a checkpoint may have it elsewhere: that would wait each time
                    own = {name: own_part(tensor) for name, tensor in state.items()}
                    _update(own_part(parameter), own_part(parameter.grad), own, group)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor; all of it where none divide it."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor  # a second to load

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _fresh(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """All moments 0."""
    coded = parameter.ndim >= 2 and parameter.numel() >= SMALL
    state = {"step": torch.zeros(())}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        zero = int((codes(signed) == 0).nonzero()) if coded else 0
        state[name] = torch.full_like(parameter, zero, dtype=torch.uint8 if coded else torch.float32)
        state[f"{name}_scale"] = _scales(parameter) if coded else torch.zeros(0)
    return state


def _scales(parameter: torch.Tensor) -> torch.Tensor:
    """[rows, blocks of a row] of 0, divided among ranks as the rows are."""
    shape = (len(parameter), math.ceil(parameter[0].numel() / BLOCK))
    if own_part(parameter) is parameter:
        return torch.zeros(shape, device=parameter.device)
    from torch.distributed.tensor import DTensor, zeros

    assert isinstance(parameter, DTensor)
    return zeros(shape, device_mesh=parameter.device_mesh, placements=parameter.placements)


def _update(
    parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
) -> None:  # fmt: skip
    (beta1, beta2), count = group["betas"], float(state["step"])
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    if not parameter.numel():
        return  # fewer rows than ranks
    rows = max(1, CHUNK // parameter[0].numel())
    for start in range(0, len(parameter), rows):
        part, own = parameter[start : start + rows], gradient[start : start + rows]
        first = _Stored(state, "exp_avg", start, rows)
        second = _Stored(state, "exp_avg_sq", start, rows)
        mean = first.read().lerp_(own, 1 - beta1)
        square = second.read().mul_(beta2).addcmul_(own, own, value=1 - beta2)
        part.addcdiv_(
            mean, (square.sqrt() / math.sqrt(correction2)).add_(group["eps"]), value=-group["lr"] / correction1
        )
        first.write(mean)
        second.write(square)


class _Stored:
    """Some rows of one moment."""

    def __init__(self, state: dict[str, torch.Tensor], name: str, start: int, rows: int) -> None:
        self._values = state[name][start : start + rows]
        scales = state[f"{name}_scale"]
        self._scales = scales[start : start + rows, :, None] if len(scales) else scales  # [rows, blocks, 1]
        self._signed = name == "exp_avg"

    def read(self) -> torch.Tensor:
        """float32, a copy."""
        if self._values.dtype == torch.float32:
            return self._values.clone()
        table = codes(self._signed).to(self._values.device)
        return self._joined(self._blocks(table[self._values.int()]).mul_(self._scales))

    def write(self, values: torch.Tensor) -> None:
        """Take over `values`."""
        if self._values.dtype == torch.float32:
            self._values.copy_(values)
            return
        blocks = self._blocks(values)
        self._scales.copy_(blocks.abs().amax(2, keepdim=True))
        table = codes(self._signed).to(values.device)
        shares = blocks / self._scales.clamp(min=torch.finfo(torch.float32).tiny)
        nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
        if not self._signed:
            nearest = torch.where(blocks > 0, nearest.clamp(min=1), nearest)
        self._values.copy_(self._joined(nearest))

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """[rows, blocks, BLOCK], the last block of each row filled up with 0."""
        flat, blocks = values.reshape(len(values), -1), self._scales.shape[1]
        return torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.shape[1])).view(len(flat), blocks, BLOCK)

    def _joined(self, blocks: torch.Tensor) -> torch.Tensor:
        """Inverse of `_blocks`."""
        return blocks.flatten(1)[:, : self._values[0].numel()].reshape(self._values.shape)


@cache
def codes(signed: bool) -> torch.Tensor:
    """[256] float32, rising: what the codes mean, as a share of their scale; 0 and 1 are among them.

    Each decade 10^-d below 1 has the middles of 2^(k - d) equal parts of [0.1, 1], for d = 0 to 6, with k = 6 for
    signed codes and 7 for others: half as many codes a decade further down.
    """
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2 ** ((6 if signed else 7) - decade)
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0**-decade for i in range(parts)]
        found += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32)
