from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import WeightError
from astraflow.weights.delta.order import ELEMENTS, add, dtype_code, flat_bits, ordered, unzigzag, zigzag
from astraflow.weights.manifest import DTYPES

FLOATS = [code for code, element in ELEMENTS.items() if element.floating]
NARROW = [code for code in FLOATS if ELEMENTS[code].nbytes <= 2]


def patterns(code: str) -> np.ndarray:
    """All patterns of a narrow dtype; of a wide one the special ones and some between."""
    element = ELEMENTS[code]
    if element.nbytes <= 2:
        return np.arange(1 << (8 * element.nbytes)).astype(f"<u{element.nbytes}").view(element.signed)
    width = 8 * element.nbytes
    special = [0, 1, (1 << (width - 1)) - 1, 1 << (width - 1), (1 << (width - 1)) + 1, (1 << width) - 1]
    random = np.random.default_rng(0).integers(0, 1 << width, 20_000, dtype=f"u{element.nbytes}")
    return np.concatenate([np.array(special, dtype=random.dtype), random]).view(element.signed)


def test_floats_and_only_floats_are_sign_and_magnitude() -> None:
    assert FLOATS == ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]


@pytest.mark.parametrize("code", list(ELEMENTS))
def test_every_pattern_comes_back(code: str) -> None:
    bits = patterns(code)
    there = ordered(bits, ELEMENTS[code])
    assert len(np.unique(there)) == len(np.unique(bits))
    np.testing.assert_array_equal(ordered(there, ELEMENTS[code]), bits)


@pytest.mark.parametrize("code", FLOATS)
def test_larger_numbers_are_larger_integers(code: str) -> None:
    bits = patterns(code)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, DTYPES[code][0])).double().numpy()
    finite = np.isfinite(values)
    integers = ordered(bits, ELEMENTS[code])[finite]
    by_value = values[finite][np.argsort(integers)]
    assert (np.diff(by_value) >= 0).all()


@pytest.mark.parametrize("code", FLOATS)
def test_the_signed_zeros_are_neighbours(code: str) -> None:
    element = ELEMENTS[code]
    zeros = np.array([0, -(1 << (8 * element.nbytes - 1))], element.signed)
    assert ordered(zeros, element).tolist() == [0, -1]


@pytest.mark.parametrize("code", list(ELEMENTS))
def test_torch_and_numpy_order_alike(code: str) -> None:
    bits = patterns(code)
    there = ordered(torch.from_numpy(bits.copy()), ELEMENTS[code])
    np.testing.assert_array_equal(there.numpy(), ordered(bits, ELEMENTS[code]))


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
def test_small_differences_are_small_codes(nbytes: int) -> None:
    assert zigzag(np.array([0, -1, 1, -2, 2], f"<i{nbytes}")).tolist() == [0, 1, 2, 3, 4]


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_zigzag_comes_back(nbytes: int, numbers: list[int]) -> None:
    differences = np.array([*numbers, -(1 << 63), (1 << 63) - 1], np.int64).astype(f"<i{nbytes}")
    np.testing.assert_array_equal(unzigzag(zigzag(differences)), differences)


@pytest.mark.parametrize("code", list(ELEMENTS))
def test_what_was_added_can_be_taken_back(code: str) -> None:
    before = patterns(code)
    bits, rng = before.copy(), np.random.default_rng(1)
    positions = np.flatnonzero(rng.random(len(bits)) < 0.3)
    differences = rng.integers(0, 256, (len(positions), bits.itemsize), dtype=np.uint8).view(bits.dtype).reshape(-1)
    add(bits, positions, differences, ELEMENTS[code])
    assert not np.array_equal(bits, before)
    add(bits, positions, -differences, ELEMENTS[code])
    np.testing.assert_array_equal(bits, before)


def test_flat_bits_share_memory_where_they_can() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    flat_bits(tensor)[5] = 0x3F80
    assert tensor[1, 1] == 1.0
    assert flat_bits(tensor.t()).tolist() == flat_bits(tensor.t().contiguous()).tolist()
    assert flat_bits(torch.tensor(True)).tolist() == [1]
    assert flat_bits(torch.empty(0, 3)).tolist() == []


def test_a_dtype_without_a_code_is_named() -> None:
    assert dtype_code("a", torch.zeros(1, dtype=torch.float8_e5m2)) == "F8_E5M2"
    with pytest.raises(WeightError, match=r"tensor a\.dtype=torch\.complex64"):
        dtype_code("a", torch.zeros(1, dtype=torch.complex64))
