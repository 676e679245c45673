from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.format import Header, Segment, split_part
from astraflow.weights.delta.reader import DeltaReader, Run, Stretch
from astraflow.weights.delta.writer import Described, PartWriter


@pytest.fixture(scope="module")
def part() -> bytes:
    writer = PartWriter(3, 4, ["gone"])
    run = Run(np.array([0, 7, 300], np.int64), np.array([1, -1, 5], np.int16))
    assert not list(writer.sparse(Described("a", "BF16", (20, 30)), [run]))
    assert not list(writer.full(Described("b", "F32", (5,)), [Stretch(0, np.arange(5, dtype=np.int32) << 20)]))
    assert not list(writer.full(Described("c", "F32", (0, 2)), []))
    return writer.close()


def test_a_part_says_what_it_holds(part: bytes) -> None:
    header = split_part(part).header
    assert (header.base, header.version, header.part, header.last, header.removed) == (3, 4, 0, True, ("gone",))
    segments = {segment.name: (group.encoding, segment) for group in header.groups for segment in group.segments}
    assert segments == {
        "a": ("sparse", Segment("a", "BF16", (20, 30), 0, 3)),
        "b": ("full", Segment("b", "F32", (5,), 0, 5)),
        "c": ("full", Segment("c", "F32", (0, 2), 0, 0)),
    }


def test_any_flipped_byte_is_refused(part: bytes, codec: Any) -> None:
    for at in range(len(part)):
        for mask in (1, 0x80, 0xFF):
            with pytest.raises(DamagedDelta):
                split_part(codec.flip(part, at, mask, seal=False))


def test_a_cut_part_is_refused(part: bytes) -> None:
    for length in range(len(part)):
        with pytest.raises(DamagedDelta):
            split_part(part[:length])
    with pytest.raises(DamagedDelta):
        split_part(part + b"\0")


def test_a_part_whose_checksum_fits_is_read_or_refused_never_more(part: bytes, codec: Any) -> None:
    outcomes = set()
    for at in range(len(part) - 16):
        for mask in (1, 0x80, 0xFF):
            try:
                read(codec.flip(part, at, mask, seal=True))
                outcomes.add("read")
            except DamagedDelta:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def read(part: bytes) -> None:
    delta = DeltaReader([part])
    for name in delta.names:
        list(delta.stretches(name) if delta.is_full(name) else delta.runs(name))


def in_group(number: int, **changes: Any) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        groups = list(header.groups)
        groups[number] = msgspec.structs.replace(groups[number], **changes)
        return msgspec.structs.replace(header, groups=tuple(groups))

    return change


def borrow(header: Header) -> Header:
    """The lengths of planes add up, but one of them is negative."""
    first, second, *others = header.groups[0].blocks[0]
    return in_group(0, blocks=((-1, first + second + 1, *others),))(header)


def sparse(**changes: Any) -> Callable[[Header], Header]:
    return in_group(
        0, segments=(Segment(**({"name": "a", "dtype": "BF16", "shape": (20, 30), "start": 0, "count": 3} | changes)),)
    )


@pytest.mark.parametrize(
    "change",
    [
        sparse(count=4), sparse(count=2), sparse(count=0), sparse(count=-3), sparse(count=1 << 70),
        sparse(start=-1), sparse(start=598), sparse(shape=(2,)), sparse(shape=(-20, -30)), sparse(shape=(1 << 50,)),
        sparse(dtype="F32"), sparse(dtype="X9"),
        in_group(0, nbytes=4), in_group(0, nbytes=0), in_group(0, block=0), in_group(0, block=2), in_group(0, block=-1),
        in_group(0, block=1 << 40), in_group(0, encoding="full"), in_group(1, encoding="sparse"),
        in_group(0, blocks=()), in_group(0, blocks=((),)), in_group(0, blocks=((3, 3, 3, 3, 3),)),
        in_group(0, blocks=((-1, 3, 3, 3),)), in_group(0, blocks=((1 << 40, 0, 0, 0),)), in_group(0, segments=()),
        borrow, lambda header: msgspec.structs.replace(header, groups=header.groups[:1]),
        lambda header: msgspec.structs.replace(header, groups=header.groups * 2),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(
    part: bytes, codec: Any, change: Callable[[Header], Header]
) -> None:
    with pytest.raises(DamagedDelta):
        read(codec.forge(part, change))


def test_a_header_that_is_none_is_refused(codec: Any) -> None:
    for prefix in (b"AFD1", b"AFD2"):
        for sizes in ((5, 5), (5, 1 << 31), (1 << 31, 5), (0, 0), (5, 6)):
            body = prefix + b"".join(size.to_bytes(4, "little") for size in sizes) + b"[1,2]"
            with pytest.raises(DamagedDelta):
                split_part(codec.flip(body + bytes(16), 0, 0, seal=True))
