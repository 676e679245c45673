"""Arrays of unsigned integers as byte planes, each compressed by zstd.

Gaps and differences are small numbers in wide integers: the plane of the lowest bytes holds nearly all information and
planes above it are nearly constant. Stored length says how a plane was stored: 0, all bytes are zero; as long as the
plane, it is plain; else one zstd frame. A plane's length is known before it is decoded, so nothing in a damaged
stream decides how much memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.order import Ints

LEVEL = 1
"""Level 3 finds nothing more in such planes (measured), and is half as fast."""


def width_for(largest: int) -> int:
    """Bytes of the narrowest integer of 1, 2, 4 or 8 bytes that holds `largest`."""
    return next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width))


def pack(values: Ints) -> list[bytes]:
    """Unsigned integers -> as many planes as they have bytes, lowest first."""
    width = values.dtype.itemsize
    as_bytes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width)
    planes = (np.ascontiguousarray(as_bytes[:, byte]) for byte in range(width))
    return [compress(plane.data) if plane.any() else b"" for plane in planes]


def unpack(planes: Sequence[memoryview], count: int) -> Ints:
    """Inverse of `pack` for `count` integers. Raises DamagedDelta: a plane does not hold `count` bytes."""
    dtype = np.dtype(f"<u{len(planes)}")
    values = np.zeros(count, dtype)
    for byte, stored in enumerate(planes):
        if len(stored):
            plane = np.frombuffer(decompress(stored, count), np.uint8)
            values |= plane if not byte else plane.astype(dtype) << (8 * byte)
    return values


def compress(plain: bytes | memoryview) -> bytes:
    """One zstd frame, or the bytes themselves where that is not shorter."""
    packed: bytes = _codec().compress(plain, asbytes=True)
    return packed if len(packed) < len(plain) else bytes(plain)


def decompress(stored: memoryview, nbytes: int) -> memoryview:
    """Inverse of `compress`; takes no more memory than `nbytes`. Raises DamagedDelta: it is not `nbytes` long."""
    if len(stored) == nbytes:
        return stored
    try:
        return memoryview(_codec().decompress(stored, nbytes))
    except (OSError, ValueError) as error:
        raise DamagedDelta(
            "delta stream", f"{len(stored)} bytes", f"must unpack to {nbytes} bytes ({error})", "fetch the part again"
        ) from error


def _codec() -> pa.Codec:
    # Not shared: nothing promises that two threads may use one. Making it takes a microsecond.
    return pa.Codec("zstd", compression_level=LEVEL)


def entropy_bits(values: Ints) -> float:
    """Bits that an ideal coder of single bytes needs for `pack(values)`: what zstd comes close to."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize)
    total = 0.0
    for byte in range(planes.shape[1]):
        counts = np.bincount(planes[:, byte], minlength=256)
        counts = counts[counts > 0]
        total += float(-(counts * np.log2(counts / counts.sum())).sum())
    return total
