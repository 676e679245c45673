"""The whole model in host memory, as it was published last: kept by the leader, moved on by the ranks' changes.

The delta is encoded while the changes are made, so nothing is compared again and no second copy is needed but that of
the tensor at hand. Its bytes are those that `delta.encode` makes of the two versions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from astraflow.weights.delta.encode import HOST_CHUNK_BYTES, changes, sample, sparse_pays, stretches
from astraflow.weights.delta.order import ELEMENTS, Element, add, empty, flat_bits, torch_dtype
from astraflow.weights.delta.reader import Run
from astraflow.weights.delta.writer import Described, PartWriter
from astraflow.weights.shards.regions import Region
from astraflow.weights.shards.snapshot import Change

if TYPE_CHECKING:
    import torch


class Block(NamedTuple):
    """What came of one tensor from one rank."""

    region: Region
    change: Change


class HostCopy:
    """Tensors by name, in the order of the last version. `version`: what they are; -1: nothing whole."""

    def __init__(self) -> None:
        self.version = -1
        self.tensors: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] = {}
        self._writer: PartWriter | None = None
        self.parts: list[bytes] = []  # of the delta to the last version, where one was asked for

    def begin(self, version: int, names: Collection[str], *, encode: bool) -> None:
        """From here to `end` the tensors are of no version. `encode`: the changes to `version` become a delta."""
        self.parts.clear()
        self._writer = None
        if encode and self.version >= 0:
            self._writer = PartWriter(self.version, version, self.tensors.keys() - set(names))
        self.version, self._next = -1, {}

    def change(self, what: Described, blocks: Sequence[Block]) -> None:
        """Bring one tensor to the next version. Each is given once, in order."""
        element = ELEMENTS[what.dtype]
        tensor = self.tensors.pop(what.name, None)
        if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (torch_dtype(what.dtype), what.shape):
            tensor = empty(what.dtype, what.shape)
            _put(tensor, what, blocks)
            self._write_full(what, tensor)
        elif self._writer is None:
            _put(tensor, what, blocks)
        elif any(block.change.sent.whole for block in blocks):
            before = flat_bits(tensor)
            tensor = tensor.clone()
            _put(tensor, what, blocks)
            after = flat_bits(tensor)
            if sparse_pays(sample(before), sample(after), element):
                self.parts += self._writer.sparse(what, changes(before, after, element))
            else:
                self._write_full(what, tensor)
        else:
            self._change_some(self._writer, what, tensor, _merged(blocks))
        self._next[what.name] = tensor

    def end(self, version: int) -> None:
        """All tensors were given."""
        if self._writer is not None:
            self.parts.append(self._writer.close())
            self._writer = None
        self.tensors, self._next, self.version = self._next, {}, version

    def drop(self) -> None:
        """Something went wrong: nothing is held any more."""
        self.version, self.tensors, self._next, self._writer = -1, {}, {}, None
        self.parts.clear()

    def _change_some(self, writer: PartWriter, what: Described, tensor: torch.Tensor, run: Run) -> None:
        bits, element = flat_bits(tensor), ELEMENTS[what.dtype]
        before = sample(bits).copy()
        add(bits.numpy(), run.positions, run.differences, element)
        if sparse_pays(before, sample(bits), element):
            self.parts += writer.sparse(what, _as_compared(run, element))
        else:
            self._write_full(what, tensor)

    def _write_full(self, what: Described, tensor: torch.Tensor) -> None:
        if self._writer is not None:
            self.parts += self._writer.full(what, stretches(flat_bits(tensor)))


def _merged(blocks: Sequence[Block]) -> Run:
    """Changes of all ranks in ascending order."""
    positions = np.concatenate([block.change.positions.astype(np.int64) for block in blocks] or [np.empty(0, np.int64)])
    differences = np.concatenate([block.change.values for block in blocks])
    if (positions[1:] < positions[:-1]).any():
        order = np.argsort(positions, kind="stable")
        positions, differences = positions[order], differences[order]
    return Run(positions, differences)


def _as_compared(run: Run, element: Element) -> Iterator[Run]:
    """In the portions in which `encode` finds them, since parts are cut between portions."""
    chunk = HOST_CHUNK_BYTES // element.nbytes
    last = int(run.positions[-1]) + 1 if len(run.positions) else 0
    cuts = np.searchsorted(run.positions, np.arange(chunk, last, chunk))
    yield from map(Run, np.split(run.positions, cuts), np.split(run.differences, cuts))


def _put(tensor: torch.Tensor, what: Described, blocks: Sequence[Block]) -> None:
    whole = flat_bits(tensor).numpy()
    for region, (sent, positions, values) in blocks:
        if not sent.whole:
            add(whole, positions.astype(np.int64), values, ELEMENTS[what.dtype])
        elif math.prod(what.shape):
            region.put(whole.reshape(what.shape), values)
