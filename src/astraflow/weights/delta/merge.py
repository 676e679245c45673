"""Several deltas in a row -> one, without the models: differences add up. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from astraflow.weights.delta.faults import DamagedDelta, WrongBase
from astraflow.weights.delta.order import Ints, add
from astraflow.weights.delta.reader import DeltaReader, Run, Stretch
from astraflow.weights.delta.writer import Described, PartWriter
from astraflow.weights.files.layout import PART_BYTES


def merge(deltas: Sequence[Sequence[Any]], *, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Parts of the delta from the base of the first to the version of the last; each of `deltas` is all its parts.

    What went there and back vanishes. A whole tensor replaces what came before it, and later changes are made in it.
    Holds one block of each delta, and one tensor where one travels whole.

    Raises: DamagedDelta. WrongBase: one does not start where the one before it ended.
    """
    readers = [DeltaReader(parts) for parts in deltas]
    for earlier, later in pairwise(readers):
        if earlier.version != later.base:
            raise WrongBase("delta base", later.base, f"must be {earlier.version}", "merge deltas in a row")
    histories: dict[str, list[DeltaReader]] = {}
    removed: set[str] = set()
    for reader in readers:
        for name in reader.removed:
            histories.pop(name, None)
        removed = (removed | reader.removed) - reader.names
        for name in reader.names:
            histories.setdefault(name, []).append(reader)
    writer = PartWriter(readers[0].base, readers[-1].version, removed, part_bytes=part_bytes)
    for name, history in histories.items():
        yield from _merge_tensor(name, history, writer)
    yield writer.close()


def _merge_tensor(name: str, history: list[DeltaReader], writer: PartWriter) -> Iterator[bytes]:
    whole = max((at for at, reader in enumerate(history) if reader.is_full(name)), default=-1)
    history = history[max(0, whole) :]
    segment = history[0].segment(name)
    what = Described(name, segment.dtype, segment.shape)
    for reader in history[1:]:
        later = reader.segment(name)
        if (later.dtype, later.shape) != (what.dtype, what.shape):
            raise DamagedDelta(
                f"delta {name}", f"{later.dtype} {later.shape}", f"must be {what.dtype} {what.shape}",
                "fetch the version in full",
            )  # fmt: skip
    if whole < 0:
        yield from writer.sparse(what, sum_runs([reader.runs(name) for reader in history]))
        return
    bits = np.empty(segment.num_elements, segment.element.signed)
    for start, new in history[0].stretches(name):
        bits[start : start + len(new)] = new
    for reader in history[1:]:
        for run in reader.runs(name):
            add(bits, run.positions, run.differences, segment.element)
    yield from writer.full(what, [Stretch(0, bits)])


def sum_runs(streams: Sequence[Iterator[Run]]) -> Iterator[Run]:
    """Runs of the sum of several changes of one tensor, in ascending order; zero sums are left out."""
    heads = [head for stream in streams if (head := _Head(stream)).has_more()]
    while heads:
        # All that is known up to the nearest end is complete: later runs of every stream lie behind it.
        horizon = min(head.last for head in heads)
        taken = [head.take(horizon) for head in heads]
        summed = taken[0] if len(taken) == 1 else _sum(taken)
        if len(summed.positions):
            yield summed
        heads = [head for head in heads if head.has_more()]


def _sum(runs: list[Run]) -> Run:
    positions = np.concatenate([run.positions for run in runs])
    differences = np.concatenate([run.differences for run in runs])
    order = np.argsort(positions, kind="stable")  # finds the ascending runs and merges them
    positions, differences = positions[order], differences[order]
    first = np.flatnonzero(np.diff(positions, prepend=-1))
    sums = np.add.reduceat(differences, first, dtype=differences.dtype)
    kept = np.flatnonzero(sums)
    return Run(positions[first][kept], sums[kept])


class _Head:
    """The part of a stream of runs that was read and not yet taken."""

    def __init__(self, stream: Iterator[Run]) -> None:
        self._stream = stream
        self._positions: Ints = np.empty(0, np.int64)
        self._differences: Ints = np.empty(0, np.int64)

    def has_more(self) -> bool:
        """Whether anything is left; reads on when all that was read is taken."""
        while not len(self._positions):
            run = next(self._stream, None)
            if run is None:
                return False
            self._positions, self._differences = run
        return True

    @property
    def last(self) -> int:
        """The last position that was read."""
        return int(self._positions[-1])

    def take(self, horizon: int) -> Run:
        """What lies at or before `horizon`."""
        cut = int(np.searchsorted(self._positions, horizon, side="right"))
        taken = Run(self._positions[:cut], self._differences[:cut])
        self._positions, self._differences = self._positions[cut:], self._differences[cut:]
        return taken
