"""All parts of one delta, read tensor by tensor. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence
from typing import Any, NamedTuple

import numpy as np

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.format import MAX_ELEMENTS, DeltaPart, Group, Segment, split_part
from astraflow.weights.delta.order import Ints, unzigzag
from astraflow.weights.delta.planes import unpack, unpack_numbers


class Run(NamedTuple):
    """Some changed elements of a tensor, in ascending order."""

    positions: Ints  # [n] int64, flat
    differences: Ints  # [n] signed, of the tensor's element width, modulo 2^bits


class Stretch(NamedTuple):
    """Bit patterns of neighbouring elements."""

    start: int
    bits: Ints  # [n] signed


class _Stream:
    """A group with its last block decoded, so that small tensors of one block cost one decoding."""

    def __init__(self, group: Group, blocks: list[list[memoryview]]) -> None:
        self.group = group
        self._blocks = blocks
        self._at = -1
        self._decoded: tuple[Ints, Ints] = (np.empty(0), np.empty(0))

    def spans(self, offset: int, count: int) -> Iterator[tuple[Ints, Ints]]:
        """Elements `offset` to `offset + count` of the group, as they lie in blocks: steps and values."""
        while count:
            number, low = divmod(offset, self.group.block)
            if number != self._at:
                self._decoded, self._at = self._decode(number), number
            steps, values = self._decoded
            taken = min(count, len(values) - low)
            yield steps[low : low + taken], values[low : low + taken]
            offset, count = offset + taken, count - taken

    def _decode(self, number: int) -> tuple[Ints, Ints]:
        planes, group = self._blocks[number], self.group
        count = min(group.block, group.count - number * group.block)
        if group.encoding == "full":
            values = unpack(planes, count)
            return values, values.view(f"<i{group.nbytes}")
        gaps = unpack_numbers(planes[0], planes[1], count, "<u8")
        if int(gaps.max()) >= MAX_ELEMENTS:
            raise _contradiction("gap", int(gaps.max()), "is longer than any tensor")
        steps = gaps.view(np.int64)
        steps += 1
        return steps, unzigzag(unpack_numbers(planes[2], planes[3], count, f"<u{group.nbytes}"))


class _Place(NamedTuple):
    stream: _Stream
    segment: Segment
    offset: int  # of the segment's first element in its group


class DeltaReader:
    """A delta. Blocks are decoded when they are asked for, one at a time; not thread-safe.

    Raises: DamagedDelta: a part is damaged or missing, or parts of several deltas are mixed.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        found = [split_part(part) for part in parts]
        headers = [part.header for part in found]
        ends = [h.last for h in headers]
        if [h.part for h in headers] != list(range(len(found))) or ends != [False] * (len(found) - 1) + [True]:
            raise _contradiction("parts", [h.part for h in headers], "must be all parts of the delta, in order")
        if len({(h.base, h.version) for h in headers}) != 1:
            raise _contradiction("parts", [(h.base, h.version) for h in headers], "must be of one delta")
        self.base, self.version = headers[0].base, headers[0].version
        self.removed = frozenset(name for h in headers for name in h.removed)
        self._places: dict[str, list[_Place]] = {}
        for part in found:
            self._place(part)
        for name, places in self._places.items():
            _check_tensor(name, places)

    def _place(self, part: DeltaPart) -> None:
        for group, blocks in zip(part.header.groups, part.planes(), strict=True):
            stream, offset = _Stream(group, blocks), 0
            for segment in group.segments:
                self._places.setdefault(segment.name, []).append(_Place(stream, segment, offset))
                offset += segment.count

    @property
    def names(self) -> KeysView[str]:
        """Tensors that the delta changes or brings."""
        return self._places.keys()

    def segment(self, name: str) -> Segment:
        """The first segment of a tensor: its dtype and shape."""
        return self._places[name][0].segment

    def is_full(self, name: str) -> bool:
        """Whether the tensor travels whole."""
        return self._places[name][0].stream.group.encoding == "full"

    def runs(self, name: str) -> Iterator[Run]:
        """Changed elements of a sparse tensor. Raises DamagedDelta."""
        last = -1
        for stream, segment, offset in self._places[name]:
            if segment.start <= last:
                raise _contradiction(f"{name} segment", segment.start, f"must start after element {last}")
            last = segment.start - 1
            for steps, differences in stream.spans(offset, segment.count):
                positions = np.cumsum(steps)
                positions += last
                last = int(positions[-1])
                if last >= segment.num_elements:
                    raise _contradiction(f"{name} position", last, f"must be below {segment.num_elements}")
                yield Run(positions, differences)

    def stretches(self, name: str) -> Iterator[Stretch]:
        """Elements of a full tensor. Raises DamagedDelta."""
        for stream, segment, offset in self._places[name]:
            start = segment.start
            for _, bits in stream.spans(offset, segment.count):
                yield Stretch(start, bits)
                start += len(bits)


def _check_tensor(name: str, places: list[_Place]) -> None:
    kinds = {(p.stream.group.encoding, p.segment.dtype, p.segment.shape) for p in places}
    if len(kinds) != 1:
        raise _contradiction(name, sorted(map(str, kinds)), "must have one encoding, dtype and shape")
    if places[0].stream.group.encoding == "full":
        end = 0
        for place in places:
            if place.segment.start != end:
                raise _contradiction(f"{name} segment", place.segment.start, f"must start at element {end}")
            end += place.segment.count
        if end != places[0].segment.num_elements:
            raise _contradiction(f"{name} elements", end, f"must be {places[0].segment.num_elements}")


def _contradiction(thing: str, value: object, rule: str) -> DamagedDelta:
    return DamagedDelta(f"delta {thing}", value, rule, "fetch the delta again; if it stays, fetch the version in full")
