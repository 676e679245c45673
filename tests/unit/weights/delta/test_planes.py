from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.planes import (
    compress,
    decompress,
    entropy_bits,
    number_bits,
    pack,
    pack_numbers,
    unpack,
    unpack_numbers,
)


def views(planes: list[bytes]) -> list[memoryview]:
    return [memoryview(plane) for plane in planes]


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, (1 << 64) - 1), min_size=1), st.integers(0, 64))
def test_planes_come_back(width: int, numbers: list[int], shift: int) -> None:
    values = (np.array(numbers, np.uint64) >> np.uint64(min(shift, 63))).astype(f"<u{width}")
    planes = pack(values)
    assert len(planes) == width
    assert all(len(plane) <= len(values) for plane in planes)
    np.testing.assert_array_equal(unpack(views(planes), len(values)), values)


def test_planes_of_zeros_take_nothing_and_noise_is_kept_plain() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 5000).astype("<u4")
    planes = pack(noise)
    assert [len(plane) for plane in planes[1:]] == [0, 0, 0]
    assert planes[0] == noise.astype(np.uint8).tobytes()
    assert [len(plane) for plane in pack(np.zeros(9, "<u2"))] == [0, 0]


EDGES = [(1 << n) + d for n in range(64) for d in (-1, 0, 1) if n or d >= 0] + [(1 << 64) - 1]


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, (1 << 64) - 1), min_size=1), st.integers(0, 63))
def test_numbers_come_back(width: int, numbers: list[int], shift: int) -> None:
    values = (np.array(numbers, np.uint64) >> np.uint64(shift)).astype(f"<u{width}")
    symbols, below = views(pack_numbers(values))
    found = unpack_numbers(symbols, below, len(values), f"<u{width}")
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_size_of_number_comes_back(width: int) -> None:
    values = np.array([edge for edge in EDGES if edge < 1 << 8 * width], f"<u{width}")
    symbols, below = views(pack_numbers(values))
    np.testing.assert_array_equal(unpack_numbers(symbols, below, len(values), f"<u{width}"), values)


@given(st.integers(8, 300), st.integers(0, 20))
def test_numbers_of_a_distribution_cost_what_an_ideal_coder_needs(scale: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).geometric(1 / scale, 1 << 15).astype("<u2")
    share = np.bincount(numbers) / len(numbers)
    ideal = -float((share[share > 0] * np.log2(share[share > 0])).sum()) * len(numbers) / 8
    assert sum(map(len, pack_numbers(numbers))) < 1.04 * ideal + 300
    assert 0.99 * ideal <= number_bits(numbers) / 8 < 1.02 * ideal + 1


def test_a_rare_wide_number_costs_next_to_nothing() -> None:
    gaps = np.full(1 << 17, 7, "<u8")
    gaps[[5, 90_000]] = 1 << 40, 70_000
    assert sum(map(len, pack_numbers(gaps))) < 200


@pytest.mark.parametrize("cut", [-3, -1, 1, 100])
@pytest.mark.parametrize("largest", [100, 1 << 40])
def test_bits_of_another_length_are_refused(cut: int, largest: int) -> None:
    symbols, below = pack_numbers(np.linspace(0, largest, 100).astype("<u8"))
    below = below[:cut] if cut < 0 else below + bytes(cut)
    with pytest.raises(DamagedDelta, match="must have"):
        unpack_numbers(memoryview(symbols), memoryview(below), 100, "<u8")


@pytest.mark.parametrize("nbytes", [100, 999, 1001, 1 << 30])
def test_a_stream_of_another_length_is_refused(nbytes: int) -> None:
    stored = memoryview(compress(bytes(1000)))
    assert bytes(decompress(stored, 1000)) == bytes(1000)
    with pytest.raises(DamagedDelta, match=f"must unpack to {nbytes} bytes"):
        decompress(stored, nbytes)


@pytest.mark.parametrize("garbage", [b"", b"\0", b"(\xb5/\xfd", b"not zstd at all", bytes(64)])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(DamagedDelta):
        decompress(memoryview(garbage), 1000)


def test_entropy_is_that_of_single_bytes() -> None:
    assert entropy_bits(np.zeros(100, "<u2")) == 0
    assert entropy_bits(np.arange(256).astype("<u2")) == pytest.approx(256 * 8)
    assert entropy_bits(np.array([0, 1] * 50, np.uint8)) == pytest.approx(100)
