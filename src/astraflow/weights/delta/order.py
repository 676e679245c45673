"""Bit patterns as integers in the order of the numbers they stand for.

A change by one unit in the last place is then a difference of one, also across zero. For two's complement integers the
bit pattern is such an integer already. For sign-and-magnitude floats the magnitude bits of negative numbers are
flipped. That is a bijection of all patterns and its own inverse, so NaN payloads, signed zeros (-0 is the integer just
below +0) and denormals survive. Differences are taken modulo 2^bits, as fixed-width integers do by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from astraflow.errors import WeightError
from astraflow.weights.manifest import DTYPES

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[Any]
"""A flat array of fixed-width integers: bit patterns or differences of them."""

Bits = TypeVar("Bits", npt.NDArray[Any], "torch.Tensor")

_CODES = {f"torch.{name}": code for code, (name, _) in DTYPES.items()}


class Element(NamedTuple):
    """What the codec knows of a dtype."""

    nbytes: int
    floating: bool

    @property
    def signed(self) -> np.dtype[Any]:
        """The integer of this width that bit patterns and differences are kept in."""
        return np.dtype(f"<i{self.nbytes}")


ELEMENTS = {code: Element(nbytes, "float" in name) for code, (name, nbytes) in DTYPES.items()}
"""Safetensors dtype code -> element."""


def ordered(bits: Bits, element: Element) -> Bits:
    """Bit patterns (signed integers, numpy or torch, any device) -> ordered integers, and back."""
    if not element.floating:
        return bits
    width = 8 * element.nbytes
    return bits ^ ((bits >> (width - 1)) & ((1 << (width - 1)) - 1))  # type: ignore[no-any-return]


def add(bits: Ints, positions: Ints, differences: Ints, element: Element) -> None:
    """Move some of flat bit patterns by their differences, in place. Negative differences take it back."""
    moved = ordered(np.take(bits, positions), element)
    moved += differences
    np.put(bits, positions, ordered(moved, element))


def zigzag(differences: Ints) -> Ints:
    """Signed -> unsigned of the same width: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    nbytes = differences.dtype.itemsize
    codes: Ints = (differences << 1) ^ (differences >> (8 * nbytes - 1))
    return codes.view(f"<u{nbytes}")


def unzigzag(codes: Ints) -> Ints:
    """Inverse of `zigzag`."""
    signed = f"<i{codes.dtype.itemsize}"
    halves: Ints = (codes >> 1).view(signed)
    halves ^= -(codes & 1).view(signed)
    return halves


def dtype_code(name: str, tensor: torch.Tensor) -> str:
    """Safetensors code of a tensor's dtype. Raises WeightError: it has none."""
    code = _CODES.get(str(tensor.dtype))
    if code is None:
        raise WeightError(
            f"tensor {name}.dtype", str(tensor.dtype), "cannot be published", f"use one of {', '.join(DTYPES)}"
        )
    return code


def torch_dtype(code: str) -> torch.dtype:
    """Inverse of `dtype_code`."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[code][0])  # a literal table of names, not a probe
    return dtype


def empty(code: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in host memory, its elements not set."""
    import torch

    return torch.empty(tuple(shape), dtype=torch_dtype(code))


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns of a tensor on its own device, flat: a view where it is contiguous, else a copy."""
    import torch

    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(widths[tensor.element_size()])
