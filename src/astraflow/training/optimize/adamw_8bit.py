"""AdamW whose moments take one byte each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BLOCK = 256  # moments that share a scale
SMALL = 4096  # parameters with fewer numbers keep float32 moments: they are few, and norms and biases need them
CHUNK = 1 << 24  # numbers that are in float32 at once; a multiple of BLOCK
_DECADES = 7


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits: a code per number, a float32 scale (the largest of them) per block of 256.

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
                    _update(parameter.view(-1), parameter.grad.reshape(-1), state, group)


def _fresh(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """All moments 0."""
    coded = parameter.numel() >= SMALL
    blocks = math.ceil(parameter.numel() / BLOCK) if coded else 0
    state = {"step": torch.zeros(())}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        zero = int((codes(signed) == 0).nonzero()) if coded else 0
        state[name] = torch.full_like(parameter, zero, dtype=torch.uint8 if coded else torch.float32)
        state[f"{name}_scale"] = torch.zeros(blocks, device=parameter.device)
    return state


def _update(flat: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
    (beta1, beta2), count = group["betas"], float(state["step"])
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    flat.mul_(1 - group["lr"] * group["weight_decay"])
    for start in range(0, len(flat), CHUNK):
        part, own = flat[start : start + CHUNK], gradient[start : start + CHUNK]
        first = _Stored(state, "exp_avg", start, len(part))
        second = _Stored(state, "exp_avg_sq", start, len(part))
        mean = first.read().lerp_(own, 1 - beta1)
        square = second.read().mul_(beta2).addcmul_(own, own, value=1 - beta2)
        part.addcdiv_(
            mean, (square.sqrt() / math.sqrt(correction2)).add_(group["eps"]), value=-group["lr"] / correction1
        )
        first.write(mean)
        second.write(square)


class _Stored:
    """A part of one moment."""

    def __init__(self, state: dict[str, torch.Tensor], name: str, start: int, size: int) -> None:
        self._values = state[name].view(-1)[start : start + size]
        self._scales = state[f"{name}_scale"][start // BLOCK : math.ceil((start + size) / BLOCK)]
        self._signed = name == "exp_avg"

    def read(self) -> torch.Tensor:
        """[size] float32, a copy."""
        if self._values.dtype == torch.float32:
            return self._values.clone()
        table = codes(self._signed).to(self._values.device)
        return table[self._values.int()] * self._scales.repeat_interleave(BLOCK)[: len(self._values)]

    def write(self, values: torch.Tensor) -> None:
        """Take over `values` [size]."""
        if self._values.dtype == torch.float32:
            self._values.copy_(values)
            return
        size, blocks = len(values), len(self._scales)
        blocked = torch.nn.functional.pad(values, (0, blocks * BLOCK - size)).view(blocks, BLOCK)
        self._scales.copy_(blocked.abs().amax(1))
        table = codes(self._signed).to(values.device)
        shares = (blocked / self._scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).view(-1)[:size]
        nearest = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
        if not self._signed:
            nearest = torch.where(values > 0, nearest.clamp(min=1), nearest)
        self._values.copy_(nearest)


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
