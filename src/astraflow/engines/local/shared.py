"""Several policies on one base: each has an adapter in the same live model, and an engine of its own to look at.

The base is in memory once and never changes. Rows of all policies run in one batch (`compute.mixed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.engines.local.compute.mixed import Mix, MixedLinear, mixed
from astraflow.engines.local.compute.packed import held_tensors
from astraflow.engines.local.weights import Base
from astraflow.errors import ModelError
from astraflow.models.load import checksum_of, dtype_name, state_tensors
from astraflow.models.lora.merge import adapter_pairs, merge_pair
from astraflow.types import Adapter, EffectiveWeights

Pair = tuple[torch.Tensor, torch.Tensor]  # A [rank, in], B [out, rank]


class Stacks:
    """The adapters of all policies of one model. Only the engine's thread calls it."""

    def __init__(self, model: PreTrainedModel, directory: Path, policies: int) -> None:
        """`model` as it was loaded from `directory`."""
        self.mix = Mix(policies, model.device, model.get_output_embeddings())  # type: ignore[no-untyped-call]
        self._model, self._base = model, Base(directory)
        self._own = state_tensors(model)
        self._linears = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._pairs: list[dict[str, Pair]] = [{} for _ in range(policies)]  # by weight, as published
        self._scalings = [1.0] * policies

    def load(self, policy: int, tensors: Mapping[str, torch.Tensor], adapter: Adapter) -> None:
        """The adapter of `policy` takes the place of the one before; without tensors it is the base.

        Raises: ModelError: it does not fit; nothing was changed.
        """
        self._base.check(adapter)
        pairs = adapter_pairs(tensors, self._own)
        for name, (a, b) in pairs.items():
            if name not in self._linears:
                raise ModelError(
                    "adapter tensor", name, "is on no linear layer, and several adapters share this base",
                    "leave it out of lora.targets, or give each policy an engine of its own by other engine settings",
                )  # fmt: skip
            if not (a.isfinite().all() and b.isfinite().all()):  # zero times them would spoil the rows of others
                raise ModelError("adapter tensor", name, "is not finite", "publish the version again")
        self._pairs[policy], self._scalings[policy] = pairs, adapter.scaling
        rank = max((a.shape[0] for a, _ in pairs.values()), default=0)
        if rank != self.mix.ranks[policy]:
            self._lay_out(policy, rank)
        for name in {*pairs, *(n for n, m in self._linears.items() if isinstance(m, MixedLinear))}:
            self._write(policy, mixed(self._linears[name], self.mix), pairs.get(name))

    def effective(self, policy: int, version: int) -> EffectiveWeights:
        """What rows of `policy` are computed with: its adapter merged with the base, which nothing else does here."""
        return EffectiveWeights(version, dtype_name(self._model.dtype), checksum_of(self._merged(policy)))

    def _merged(self, policy: int) -> Iterator[tuple[str, torch.Tensor]]:
        held = held_tensors(self._model)
        for name in sorted(held):
            layer, weight = self._linears.get(name), held[name]
            found = self._live(policy, name, layer) if isinstance(layer, MixedLinear) else None
            yield name, weight if found is None else merge_pair(weight, *found)

    def _live(self, policy: int, name: str, layer: MixedLinear) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """A, B and scaling of the layer; None: nothing. What was published, before it was rounded, if that is what the
        layer computes with; else what it computes with, so that the checksum shows it."""
        columns, scaling, pair = self.mix.columns_of(policy), self._scalings[policy], self._pairs[policy].get(name)
        low, high = layer.low[columns], layer.high[columns]
        if pair is not None:
            a, b = _padded(pair, scaling, layer, low.shape[0])
            if torch.equal(low, a) and torch.equal(high, b):
                return *pair, scaling
        return (low, high.t(), 1.0) if low.any() or high.any() else None

    def _lay_out(self, policy: int, rank: int) -> None:
        """Another rank: the matrices of the policies after it move. All rows of `policy` are zero then."""
        columns = self.mix.columns_of(policy)
        for layer in self._linears.values():
            if isinstance(layer, MixedLinear):
                layer.low, layer.high = (
                    torch.cat([old[: columns.start], old.new_zeros(rank, old.shape[1]), old[columns.stop :]])
                    for old in (layer.low, layer.high)
                )
        self.mix.ranks[policy] = rank

    def _write(self, policy: int, layer: MixedLinear, pair: Pair | None) -> None:
        columns, total = self.mix.columns_of(policy), sum(self.mix.ranks)
        if layer.low.shape[0] != total:  # the first adapter on this layer
            layer.low, layer.high = (old.new_zeros(total, old.shape[1]) for old in (layer.low, layer.high))
        low, high = (matrix[columns] for matrix in (layer.low, layer.high))
        if pair is None:
            low.zero_()
            high.zero_()
        else:
            a, b = _padded(pair, self._scalings[policy], layer, low.shape[0])
            low.copy_(a)
            high.copy_(b)


class OneOf:
    """The weights of one policy among those of a `Stacks`; in the place of `LiveWeights`."""

    def __init__(self, stacks: Stacks, policy: int) -> None:
        self._stacks, self._policy = stacks, policy

    def load(self, tensors: Mapping[str, torch.Tensor], adapter: Adapter | None) -> None:
        """Raises: ModelError: it does not fit, or is a whole version; nothing was changed."""
        if adapter is None:
            raise ModelError(
                "weights", "a whole version", "would take the base from the other policies of this engine",
                "publish adapters, or give the policy an engine of its own by other engine settings",
            )  # fmt: skip
        self._stacks.load(self._policy, tensors, adapter)

    def effective(self, version: int) -> EffectiveWeights:
        """See `Stacks.effective`."""
        return self._stacks.effective(self._policy, version)


def _padded(pair: Pair, scaling: float, layer: MixedLinear, rank: int) -> Pair:
    """A and scaling * B' as a layer holds them, both [rank, ...]."""
    a, b = pair
    found = []
    for matrix, like in ((a, layer.low), (b.float().t() * scaling, layer.high)):
        padded = like.new_zeros(rank, like.shape[1])
        padded[: matrix.shape[0]] = matrix.to(like)
        found.append(padded)
    return found[0], found[1]
