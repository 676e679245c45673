from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.planes import compress, decompress, entropy_bits, pack, unpack, width_for


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


def test_a_rare_wide_gap_costs_next_to_nothing() -> None:
    gaps = np.full(1 << 17, 7, "<u4")
    gaps[[5, 90_000]] = 70_000
    assert sum(map(len, pack(gaps)[2:])) < 100


@pytest.mark.parametrize(
    ("largest", "width"),
    [(0, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), ((1 << 32) - 1, 4), (1 << 32, 8), ((1 << 64) - 1, 8)],
)
def test_the_narrowest_width_is_taken(largest: int, width: int) -> None:
    assert width_for(largest) == width


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
