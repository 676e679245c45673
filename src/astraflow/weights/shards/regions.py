"""Which elements of a whole tensor one rank holds, and where they lie in its flat coordinates.

A shard's own coordinates mean nothing to readers: the rank that holds it turns them into those of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from astraflow.errors import WeightError
from astraflow.weights.delta.order import Ints

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Span = tuple[int, int]
"""start, stop."""


class Region(msgspec.Struct, frozen=True):
    """A block of a tensor: the product of what it has of each dimension."""

    spans: tuple[tuple[Span, ...], ...]  # per dimension, ascending and apart; no dimension: a scalar

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(tuple(((0, size),) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    @property
    def num_elements(self) -> int:
        """Of the block."""
        return math.prod(self.shape)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """No span ends behind a tensor of `shape`."""
        return len(self.spans) == len(shape) and all(
            0 <= start <= stop <= size for spans, size in zip(self.spans, shape, strict=True) for start, stop in spans
        )

    def overlaps(self, other: Region) -> bool:
        """Some element is in both."""
        return all(
            any(max(a[0], b[0]) < min(a[1], b[1]) for a in ours for b in theirs)
            for ours, theirs in zip(self.spans, other.spans, strict=True)
        )

    def to_whole(self, positions: Ints, shape: Sequence[int]) -> Ints:
        """Flat positions in the block -> flat positions in the tensor of `shape`, in the same order: int64."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if self._is_rows(shape):
            return positions + (self.spans[0][0][0] * strides[0] if shape else 0)
        found = np.zeros(len(positions), np.int64)
        for dim, at in enumerate(np.unravel_index(positions, self.shape)):
            found += self._index(dim)[at] * strides[dim]
        return found

    def put(self, whole: Ints, block: Ints) -> None:
        """Write all elements of the block (flat) into the tensor (an array of its shape)."""
        if all(len(spans) == 1 for spans in self.spans):
            whole[tuple(slice(*spans[0]) for spans in self.spans)] = block.reshape(self.shape)
        else:
            whole[np.ix_(*(self._index(dim) for dim in range(whole.ndim)))] = block.reshape(self.shape)

    def _is_rows(self, shape: Sequence[int]) -> bool:
        """Neighbours in the block are neighbours in the tensor."""
        return all(len(spans) == 1 for spans in self.spans[:1]) and self.spans[1:] == Region.whole(shape[1:]).spans

    def _index(self, dim: int) -> Ints:
        return np.concatenate([np.arange(*span, dtype=np.int64) for span in self.spans[dim]])


def region_of(name: str, tensor: DTensor) -> Region | None:
    """The part of a DTensor that this rank holds; None: it is not in the tensor's mesh.

    Raises: WeightError: the tensor is not made up of blocks (a pending sum), or is laid out in a way unknown here.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    spans: list[list[Span]] = [[(0, size)] for size in tensor.shape]
    for placement, at, parts in zip(tensor.placements, coordinate, mesh.shape, strict=True):
        if isinstance(placement, _StridedShard):  # before Shard, which it is derived from in older torch
            pieces = list(_chunks(spans[placement.dim], int(placement.split_factor)))
            spans[placement.dim] = [span for piece in pieces for span in list(_chunks(piece, parts))[at]]
        elif isinstance(placement, Shard):
            spans[placement.dim] = list(_chunks(spans[placement.dim], parts))[at]
        elif not isinstance(placement, Replicate):
            raise WeightError(
                f"tensor {name}.placements", str(tensor.placements), "cannot be published",
                "redistribute it to Shard or Replicate first",
            )  # fmt: skip
    return Region(tuple(tuple(joined(dim)) for dim in spans))


def _chunks(spans: Sequence[Span], parts: int) -> Iterator[list[Span]]:
    """As torch.chunk cuts it: equal parts, rounded up, the last ones shorter or empty."""
    size = sum(stop - start for start, stop in spans)
    width = -(-size // parts)
    for number in range(parts):
        yield list(_cut(spans, number * width, (number + 1) * width))


def _cut(spans: Sequence[Span], low: int, high: int) -> Iterator[Span]:
    """Elements `low` to `high`, counted over all spans."""
    begin = 0
    for start, stop in spans:
        first, last = max(low - begin, 0) + start, min(high - begin, stop - start) + start
        if first < last:
            yield first, last
        begin += stop - start


def joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Neighbours as one; nothing at all is one empty span."""
    start, stop = spans[0] if spans else (0, 0)
    for low, high in spans[1:]:
        if low != stop:
            yield start, stop
            start = low
        stop = high
    yield start, stop
