"""Linear layers on which several policies have a LoRA adapter each: rows of all of them in one pass over the base.

The small matrices of all policies lie below each other as one pair. A token's product with the first is made zero
where it is another policy's, so a pass costs two small products a layer however many policies take part in it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from astraflow.engines.local.compute.packed import PackedLinear
from astraflow.models.linear import product


class Mix:
    """Whose the tokens of the next pass are; one for all layers of a model."""

    def __init__(self, policies: int, device: torch.device, head: nn.Module | None) -> None:
        """`head`: the layer that gives the logits, which sees only the tokens whose logits are wanted."""
        self.ranks = [0] * policies
        self.columns = slice(0)  # of the pair that this pass needs
        self._own: torch.Tensor | None = None  # [tokens, columns] bool; None: all tokens are of one policy
        self._own_wanted: torch.Tensor | None = None
        self._device, self._head = device, head

    def columns_of(self, policy: int) -> slice:
        """Where its matrices lie."""
        start = sum(self.ranks[:policy])
        return slice(start, start + self.ranks[policy])

    def choose(self, policies: np.ndarray, wanted: np.ndarray) -> None:
        """`policies` [tokens]: of each token of the next pass; `wanted`: those whose logits it gives."""
        first, last = int(policies.min()), int(policies.max())
        self.columns = slice(self.columns_of(first).start, self.columns_of(last).stop)
        self._own = self._own_wanted = None
        if first < last:
            own = policies[:, None] == np.repeat(np.arange(first, last + 1), self.ranks[first : last + 1])
            self._own, self._own_wanted = (torch.from_numpy(some).to(self._device) for some in (own, own[wanted]))

    def own(self, layer: nn.Module) -> torch.Tensor | None:
        """Of the tokens that `layer` sees, which columns are their policy's: [tokens, columns] bool; None: all are."""
        return self._own_wanted if layer is self._head else self._own


class MixedLinear(PackedLinear):
    """x W' + (x A') B' with each row's own A and B. Made out of a linear layer by `mixed`."""

    low: torch.Tensor  # [columns, in]: A of all policies
    high: torch.Tensor  # [columns, out]: scaling * B' of all policies
    mix: Mix

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]; no gradient."""
        output, columns, own = super().forward(input), self.mix.columns, self.mix.own(self)
        if columns.start == columns.stop:
            return output
        low = product(input.reshape(-1, input.shape[-1]), self.low[columns])
        if own is not None:
            low = torch.where(own, low, 0.0)
        return output.add_(product(low, self.high[columns].t()).view(output.shape))


def mixed(layer: nn.Linear, mix: Mix) -> MixedLinear:
    """`layer`, made one with room for the matrices of the policies of `mix`; so far it has none."""
    if not isinstance(layer, MixedLinear):
        layer.__class__ = MixedLinear
        assert isinstance(layer, MixedLinear)
        layer.mix = mix
        layer.low, layer.high = (layer.weight.new_zeros(0, n) for n in (layer.in_features, layer.out_features))
    return layer
