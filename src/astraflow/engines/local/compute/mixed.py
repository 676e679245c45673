"""Linear layers on which several policies have a LoRA adapter each: rows of all of them in one pass over the base.

The small matrices of all policies lie below each other as one pair. A row's product with the first is made zero where
it is another policy's, so a pass costs two small products a layer however many policies take part in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from astraflow.models.linear import FastLinear, product


class Mix:
    """Whose the rows of the next pass are; one for all layers of a model."""

    def __init__(self, policies: int, device: torch.device) -> None:
        self.ranks = [0] * policies
        self.columns = slice(0)  # of the pair that this pass needs
        self.own: torch.Tensor | None = None  # [rows, 1, columns] bool; None: all rows are of one policy
        self._device = device

    def columns_of(self, policy: int) -> slice:
        """Where its matrices lie."""
        start = sum(self.ranks[:policy])
        return slice(start, start + self.ranks[policy])

    def choose(self, policies: np.ndarray) -> None:
        """`policies` [rows]: of each row of the next pass."""
        first, last = int(policies.min()), int(policies.max())
        self.columns = slice(self.columns_of(first).start, self.columns_of(last).stop)
        self.own = None
        if first < last:
            owners = np.repeat(np.arange(first, last + 1), self.ranks[first : last + 1])
            self.own = torch.from_numpy(policies[:, None] == owners).to(self._device)[:, None]


class MixedLinear(FastLinear):
    """x W' + (x A') B' with each row's own A and B. Made out of a linear layer by `mixed`."""

    low: torch.Tensor  # [columns, in]: A of all policies
    high: torch.Tensor  # [columns, out]: scaling * B' of all policies
    mix: Mix

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, in] -> [rows, tokens, out]; no gradient."""
        output, columns, own = super().forward(input), self.mix.columns, self.mix.own
        if columns.start == columns.stop:
            return output
        low = product(input.reshape(-1, input.shape[-1]), self.low[columns])
        if own is not None:
            low = torch.where(own, low.view(*input.shape[:-1], -1), 0.0).view(low.shape)
        return output.add_(product(low, self.high[columns].t()).view(output.shape))


def mixed(layer: nn.Linear, mix: Mix) -> MixedLinear:
    """`layer`, made one with room for the matrices of the policies of `mix`; so far it has none."""
    if not isinstance(layer, MixedLinear):
        layer.__class__ = MixedLinear
        assert isinstance(layer, MixedLinear)
        layer.mix = mix
        layer.low, layer.high = (layer.weight.new_zeros(0, n) for n in (layer.in_features, layer.out_features))
    return layer
