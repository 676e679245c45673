"""Writer and reader: elements into parts and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.order import ELEMENTS, add
from astraflow.weights.delta.reader import DeltaReader, Run, Stretch
from astraflow.weights.delta.writer import BLOCK, Described, PartWriter
from astraflow.weights.files.layout import PART_BYTES


def runs_of(delta: DeltaReader, name: str) -> tuple[list[int], list[int]]:
    runs = list(delta.runs(name))
    return [p for run in runs for p in run.positions.tolist()], [d for run in runs for d in run.differences.tolist()]


def test_nothing_changed_is_a_part_all_the_same() -> None:
    writer = PartWriter(0, 1)
    assert not list(writer.sparse(Described("a", "F16", (4,)), []))
    delta = DeltaReader([writer.close()])
    assert (delta.base, delta.version, list(delta.names)) == (0, 1, [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["BF16", "F16", "F32", "F64", "I8", "I64"]),
            st.sets(st.integers(0, 10_000), max_size=300).map(sorted),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.sampled_from([1 << 11, 1 << 12, 1 << 14, PART_BYTES]),
    st.integers(1, 200),
)
def test_what_is_written_is_read(tensors: list[tuple[str, list[int], bool]], part_bytes: int, piece: int) -> None:
    writer = PartWriter(0, 1, part_bytes=part_bytes)
    parts: list[bytes] = []
    for number, (code, numbers, full) in enumerate(tensors):
        values = np.array(numbers, np.int64).astype(ELEMENTS[code].signed)
        cuts = range(0, len(numbers), piece)
        if full:
            stretches = [Stretch(at, values[at : at + piece]) for at in cuts]
            parts += writer.full(Described(str(number), code, (len(numbers),)), stretches)
        else:
            positions = np.array(numbers, np.int64)
            runs = [Run(positions[at : at + piece], values[at : at + piece]) for at in cuts]
            parts += writer.sparse(Described(str(number), code, (10_001,)), runs)
    parts.append(writer.close())
    assert max(map(len, parts)) <= part_bytes
    delta = DeltaReader(parts)
    for number, (code, numbers, full) in enumerate(tensors):
        name = str(number)
        values = np.array(numbers, np.int64).astype(ELEMENTS[code].signed)
        if full:
            assert delta.is_full(name)
            found = list(delta.stretches(name))
            assert [p for s in found for p in range(s.start, s.start + len(s.bits))] == list(range(len(numbers)))
            assert [v for s in found for v in s.bits.tolist()] == values.tolist()
        elif numbers:
            assert not delta.is_full(name)
            assert runs_of(delta, name) == (numbers, values.tolist())
        else:
            assert name not in delta.names


def test_a_tensor_of_several_blocks_and_parts() -> None:
    rng = np.random.default_rng(0)
    count = 3 * BLOCK + 5
    positions = np.cumsum(rng.integers(1, 70_000, count))
    differences = rng.integers(-(1 << 15), 1 << 15, count).astype(np.int16)
    writer = PartWriter(0, 1, part_bytes=4 * 16 * BLOCK)
    what = Described("a", "BF16", (int(positions[-1]) + 1,))
    parts = [*writer.sparse(what, [Run(positions, differences)]), writer.close()]
    parts_small = PartWriter(0, 1, part_bytes=1 << 16)
    parts_many = [*parts_small.sparse(what, [Run(positions, differences)]), parts_small.close()]
    assert len(parts_many) > len(parts)
    assert max(map(len, parts)) <= 4 * 16 * BLOCK
    assert max(map(len, parts_many)) <= 1 << 16
    for written in (parts, parts_many):
        runs = list(DeltaReader(written).runs("a"))
        np.testing.assert_array_equal(np.concatenate([run.positions for run in runs]), positions)
        np.testing.assert_array_equal(np.concatenate([run.differences for run in runs]), differences)


def test_no_part_is_larger_than_asked_for_even_of_noise() -> None:
    noise = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 100_000)
    writer = PartWriter(0, 1, part_bytes=1 << 16)
    parts = [*writer.full(Described("a", "I64", (100_000,)), [Stretch(0, noise)]), writer.close()]
    assert (1 << 16) // 2 < max(map(len, parts)) <= 1 << 16


LARGE = (1 << 31) + 1000


@pytest.mark.parametrize("shape", [(LARGE,), (1 << 20, 1 << 13), (3, 1 << 40)])
def test_positions_beyond_31_bits(shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape, dtype=object))
    numbers = [0, 5, (1 << 31) - 1, 1 << 31, (1 << 31) + 3, count - 2, count - 1]
    writer = PartWriter(0, 1)
    run = Run(np.array(numbers, np.int64), np.arange(1, 8, dtype=np.int16))
    assert not list(writer.sparse(Described("a", "BF16", shape), [run]))
    assert runs_of(DeltaReader([writer.close()]), "a") == (numbers, list(range(1, 8)))


def test_elements_beyond_31_bits_are_changed_in_place(tmp_path: Path) -> None:
    bits = np.memmap(tmp_path / "sparse", np.int8, "w+", shape=(LARGE,))  # a file of holes
    positions = np.array([3, (1 << 31) - 1, 1 << 31, LARGE - 1], np.int64)
    add(bits, positions, np.array([1, 2, -3, 100], np.int8), ELEMENTS["I8"])
    assert bits[positions].tolist() == [1, 2, -3, 100]
    around = (bits[:500], bits[(1 << 31) - 500 : (1 << 31) + 500], bits[-500:])
    assert [int(np.count_nonzero(window)) for window in around] == [1, 2, 1]


def example(part_bytes: int = 1 << 11, base: int = 0) -> list[bytes]:
    writer = PartWriter(base, base + 1, part_bytes=part_bytes)
    run = Run(np.arange(0, 5000, 3), np.arange(1, 1668, dtype=np.int16))
    return [*writer.sparse(Described("a", "BF16", (5000,)), [run]), writer.close()]


def test_parts_that_miss_repeat_or_mix_are_refused() -> None:
    parts, other = example(), example(base=1)
    assert len(parts) > 2
    assert len(runs_of(DeltaReader(parts), "a")[0]) == 1667
    for wrong in (
        [], parts[:-1], parts[1:], [parts[0], *parts[2:]], [*parts, parts[-1]], [parts[1], parts[0], *parts[2:]],
        [*parts[:-1], other[-1]],
    ):  # fmt: skip
        with pytest.raises(DamagedDelta):
            DeltaReader(wrong)


@pytest.mark.parametrize(
    "change", [{"shape": (5001,)}, {"dtype": "F16"}, {"start": 0}, {"start": 100}, {"name": "b", "start": 4990}]
)
def test_segments_that_contradict_each_other_are_refused(codec: Any, change: dict[str, Any]) -> None:
    def forge(header: Any) -> Any:
        group = header.groups[0]
        segments = (msgspec.structs.replace(group.segments[0], **change),)
        return msgspec.structs.replace(header, groups=(msgspec.structs.replace(group, segments=segments),))

    parts = example()
    parts[1] = codec.forge(parts[1], forge)
    with pytest.raises(DamagedDelta):
        delta = DeltaReader(parts)
        for name in delta.names:
            list(delta.runs(name))


def spaced(*gaps: int) -> bytes:
    """A part that changes elements of a tensor of 100 with so many unchanged ones before each."""
    writer, tensor = PartWriter(0, 1), Described("a", "BF16", (100,))
    group = writer._group("sparse", tensor)
    group.extend(tensor, 0, np.array(gaps, np.uint64), np.ones(len(gaps), np.uint16))
    return writer.close()


@pytest.mark.parametrize(
    ("gaps", "rule"),
    [
        ((0, 99), "position"), ((0, 5000), "position"), ((0, 1 << 63), "gap"), ((0, (1 << 64) - 1), "gap"),
        ((0, *[(1 << 62) - 1] * 4), "gap"),  # the sum of them is 0 again
    ],
)  # fmt: skip
def test_a_gap_beyond_the_tensor_is_refused(gaps: tuple[int, ...], rule: str) -> None:
    with pytest.raises(DamagedDelta, match=rule):
        list(DeltaReader([spaced(*gaps)]).runs("a"))
    assert [run.positions.tolist() for run in DeltaReader([spaced(0, 98)]).runs("a")] == [[0, 99]]


def test_whole_tensors_must_be_whole(codec: Any) -> None:
    writer = PartWriter(0, 1, part_bytes=1 << 11)
    bits = np.random.default_rng(0).integers(0, 1 << 15, 3000).astype(np.int16)
    parts = [*writer.full(Described("a", "I16", (3000,)), [Stretch(0, bits)]), writer.close()]
    assert len(parts) > 2

    def forge(header: Any) -> Any:
        group = header.groups[0]
        segments = tuple(msgspec.structs.replace(s, start=s.start + 1) for s in group.segments)
        return msgspec.structs.replace(header, groups=(msgspec.structs.replace(group, segments=segments),))

    with pytest.raises(DamagedDelta, match="must start at element"):
        DeltaReader([parts[0], codec.forge(parts[1], forge), *parts[2:]])
    short = [parts[0], codec.forge(parts[1], lambda header: msgspec.structs.replace(header, last=True))]
    with pytest.raises(DamagedDelta, match="must be 3000"):
        DeltaReader(short)


def test_reading_and_merging_load_no_torch() -> None:
    code = "import sys; import astraflow.weights.delta.merge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
