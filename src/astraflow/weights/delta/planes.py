"""Arrays of unsigned integers as bytes: what zstd can shorten apart from what it cannot.

Bit patterns of whole tensors (`pack`) are byte planes, each compressed. Stored length says how a plane was stored: 0,
all bytes are zero; as long as the plane, it is plain; else one zstd frame.

Gaps and differences (`pack_numbers`) are small numbers with a long tail. Each becomes a symbol of one byte, its size
and leading bits, and the bits below them, which JPEG does with coefficients: symbols hold what is unequal in the
distribution and are compressed, the bits are as good as random and are stored as they are. Byte planes would need
two symbols for each number, one of them nearly constant, and a Huffman code takes a whole bit for that (measured on
trained weights: 7 % more bytes).

| symbol     | numbers                                              | bits below, and pieces of 16 bits below those |
|------------|------------------------------------------------------|-----------------------------------------------|
| 0 to 15    | 0 to 15                                              | none                                          |
| 16 to 207  | 2^n to 2^(n+1) - 1, n from 4 to 15, in 16 steps each | n - 4                                         |
| 208 to 255 | 2^n to 2^(n+1) - 1, n from 16 to 63                  | n mod 16, and n div 16 pieces                 |

Bits lie one number after the other from the lowest bit of each byte on, then come the pieces: the lowest of all numbers
that have one, the second lowest, the third. What a stream unpacks to is known before it is decoded, so nothing in a
damaged one decides how much memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.order import Ints

LEVEL = 1
"""Level 3 finds nothing more in such planes (measured), and is half as fast."""


_DIRECT, _FINE, _WIDE = 16, 208, 16  # first symbol of each kind after the first, and the size from which pieces are cut


def _symbol_table() -> tuple[Ints, Ints, Ints]:
    """Of each symbol: the number without its bits and pieces, how many bits, how many pieces."""
    least, bits, pieces = np.zeros(256, np.uint16), np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    for symbol in range(256):
        if symbol < _DIRECT:
            least[symbol] = symbol
        elif symbol < _FINE:
            size, step = divmod(symbol - _DIRECT, 16)
            least[symbol], bits[symbol] = (16 + step) << size, size
        else:
            level, size = divmod(symbol - _FINE + _WIDE, 16)
            least[symbol], bits[symbol], pieces[symbol] = 1 << size, size, level
    return least, bits, pieces


_LEAST, _BITS, _PIECES = _symbol_table()
_SYMBOL = np.repeat(np.arange(_FINE, dtype=np.uint8), 1 << _BITS[:_FINE].astype(np.int64))  # of numbers below 2^16
_BELOW = np.arange(1 << _WIDE, dtype=np.uint16) - _LEAST[_SYMBOL]
_MASK = ((1 << np.arange(16)) - 1).astype(np.uint32)


def pack_numbers(numbers: Ints) -> list[bytes]:
    """Unsigned integers (at least one) -> symbols and the bits below them."""
    symbols, below, pieces = _split(numbers)
    ends = np.cumsum(np.take(_BITS, symbols), dtype=np.int64)
    starts = ends - np.take(_BITS, symbols)
    # All that begin in one word of 32 bits add up to 64: disjoint bits, of which the upper half is the next word's.
    words = starts >> 5
    firsts = np.flatnonzero(np.diff(words, prepend=-1))
    sums = np.zeros(int(words[-1]) + 2, np.uint64)
    sums[words[firsts]] = np.add.reduceat(below.astype(np.uint64) << (starts & 31).astype(np.uint64), firsts)
    stream = (sums & 0xFFFFFFFF).astype("<u4")
    stream[1:] |= (sums[:-1] >> 32).astype(np.uint32)
    return [compress(symbols.data), b"".join([stream.tobytes()[: _num_bytes(ends)], *pieces])]


def unpack_numbers(symbols: memoryview, below: memoryview, count: int, dtype: str) -> Ints:
    """Inverse of `pack_numbers` for `count` unsigned integers. Raises DamagedDelta: the streams do not hold them."""
    found = np.frombuffer(decompress(symbols, count), np.uint8)
    num_bits, levels = np.take(_BITS, found), np.take(_PIECES, found)
    ends = np.cumsum(num_bits, dtype=np.int64)
    num_bytes, highest = _num_bytes(ends), int(levels.max())
    at_level = [levels >= level for level in range(1, highest + 1)]
    expected = num_bytes + 2 * sum(int(np.count_nonzero(has)) for has in at_level)
    if len(below) != expected:
        raise DamagedDelta("delta stream", f"{len(below)} bytes", f"must have {expected}", "fetch the part again")
    padded = np.zeros(num_bytes + 4, np.uint8)
    padded[:num_bytes] = np.frombuffer(below, np.uint8, num_bytes)
    windows = np.ndarray(num_bytes + 1, "<u4", padded, strides=(1,))  # 32 bits from each byte on
    starts = ends - num_bits
    tops = np.take(windows, starts >> 3)
    tops >>= (starts & 7).astype(np.uint32)
    tops &= np.take(_MASK, num_bits)
    tops += np.take(_LEAST, found)
    numbers: Ints = tops.astype(dtype)
    if highest:
        numbers <<= (16 * levels).astype(dtype)
    for level, has in enumerate(at_level):
        pieces = np.frombuffer(below, "<u2", int(np.count_nonzero(has)), num_bytes)
        numbers[has] |= pieces.astype(dtype) << np.array(16 * level, dtype)
        num_bytes += pieces.nbytes
    return numbers


def _split(numbers: Ints) -> tuple[Ints, Ints, list[bytes]]:
    """Symbols, the bits below each, and the pieces below those, level by level."""
    if numbers.dtype.itemsize <= 2 or int(numbers.max()) < 1 << _WIDE:
        tops = numbers.astype(np.uint16)
        return np.take(_SYMBOL, tops), np.take(_BELOW, tops), []
    size = np.frexp((numbers >> 11).astype(np.float64))[1] + 10  # exact: at most 53 bits. Too small below 2^16 only
    levels = np.where(size >= _WIDE, size >> 4, 0)
    tops = (numbers >> (16 * levels).astype(numbers.dtype)).astype(np.uint16)
    symbols = np.where(levels > 0, _FINE - _WIDE + size, _SYMBOL[tops]).astype(np.uint8)
    pieces = [
        (numbers[levels > level] >> np.array(16 * level, numbers.dtype)).astype("<u2").tobytes()
        for level in range(int(levels.max()))
    ]
    return symbols, tops - _LEAST[symbols], pieces


def _num_bytes(ends: Ints) -> int:
    return -(-int(ends[-1]) // 8)


def number_bits(numbers: Ints) -> float:
    """Bits that `pack_numbers` needs with an ideal coder of the symbols."""
    if not len(numbers):
        return 0.0
    symbols = _split(numbers)[0]
    return entropy_bits(symbols) + float((np.take(_BITS, symbols) + 16.0 * np.take(_PIECES, symbols)).sum())


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
