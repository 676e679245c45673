"""A factor on the loss that keeps gradients inside the range of float16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

GROW_AFTER = 2000  # updates without overflow


@dataclass
class LossScale:
    """Gradients of a loss times `value` are as many times larger, so that small ones are not rounded to 0; before the
    optimizer sees them they are divided by it. Where one is too large for float16 the scale is halved, and after
    `GROW_AFTER` good updates it is doubled.

    Source: Micikevicius et al. 2017, arXiv:1710.03740 section 3.2.
    """

    value: float = 65536.0
    good_updates: int = 0  # since it last changed

    @torch.no_grad()
    def undo(self, model: nn.Module) -> None:
        """Take the factor off the gradients of `model`."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.value)

    def held(self) -> None:
        """An update was good."""
        self.good_updates += 1
        if self.good_updates >= GROW_AFTER:
            self.value, self.good_updates = 2 * self.value, 0

    def lowered(self) -> bool:
        """There was an overflow. False: the scale is not to blame, as it is 1 already."""
        if self.value <= 1:
            return False
        self.value, self.good_updates = self.value / 2, 0
        return True
