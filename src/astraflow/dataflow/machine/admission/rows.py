"""The order of a source's rows, chance per row, and groups as they are opened."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import OpenGroup
from astraflow.types import Purpose, Task


class Rows:
    """The rows of one source: a seeded shuffle per epoch, and one number per row for the draw of its operators."""

    def __init__(self, source: str, num: int, seed: int) -> None:
        self.num = num
        self._source, self._seed = source, seed
        self._shuffled: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def at(self, epoch: int, position: int) -> int:
        """The row at `position` of the shuffle of `epoch`."""
        if self._shuffled[0] != epoch:
            key = [self._seed, epoch, zlib.crc32(self._source.encode())]
            self._shuffled = (epoch, np.random.Generator(np.random.PCG64(key)).permutation(self.num))
        return int(self._shuffled[1][position])

    def draw(self, epoch: int, row: int) -> float:
        """Uniform in [0, 1), the same whenever and however often the row is asked: a replay draws the same."""
        key = f"{self._seed}/{self._source}/{epoch}/{row}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11) / 2.0**53


def open_group(context: Context, group_id: str, task: Task, size: int, purpose: Purpose) -> OpenGroup:
    """A group of `size` siblings with no episode leased yet."""
    state = context.state
    group = OpenGroup(
        group_id=group_id,
        source=task.source,
        row=task.row,
        epoch=task.epoch,
        seq=state.num_groups,
        purpose=purpose,
        attempts=[0] * size,
        losses=[0] * size,
        holders=[None] * size,
        results=[None] * size,
        num_open=size,
    )
    state.num_groups += 1
    state.groups[group_id] = group
    return group
