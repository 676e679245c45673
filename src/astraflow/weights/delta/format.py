"""How one part of a delta lies in its file.

| bytes             | what                                                                         |
|-------------------|------------------------------------------------------------------------------|
| 4                 | `AFD2`                                                                       |
| 4, 4              | bytes of the header as stored and as it is (u32); equal: it is plain         |
| header            | `Header`, JSON, one zstd frame                                               |
| payload           | planes of the blocks of the groups, in the header's order, without gaps      |
| 16                | xxh3-128 of everything before                                                |

A group is one sequence of elements of one width that runs through all its segments; it is cut into blocks of `block`
elements (the last one is shorter) wherever that falls, so that small tensors share a block and the memory of a decoder
does not depend on the size of a tensor. A block is a list of planes (see planes.py): of sparse segments the symbols and
bits of the gaps and those of the zig-zag differences, of full segments the byte planes of the bit patterns. The gap of
an element counts the elements left out since the one before it, or since the start of its segment.

A tensor that does not fit in a part goes on in the next as another segment. Each part can be applied by itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from astraflow.weights.delta.faults import DamagedDelta
from astraflow.weights.delta.order import ELEMENTS, Element
from astraflow.weights.delta.planes import compress, decompress

MAGIC = b"AFD2"
MAX_BLOCK = 1 << 20
SPARSE_PLANES = 4
MAX_HEADER_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 42
"""Of a tensor: positions of a block cannot overflow 64 bits, whatever its gaps are."""

_PREFIX = struct.Struct("<4sII")
_DIGEST_BYTES = 16


class Segment(msgspec.Struct, frozen=True):
    """What one group says of one tensor, or of a stretch of it."""

    name: str  # Hugging Face name
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # first element (flat) that the segment speaks of
    count: int  # sparse: changed elements; full: elements from `start` on

    @property
    def num_elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def element(self) -> Element:
        """Of the tensor's dtype."""
        return ELEMENTS[self.dtype]


class Group(msgspec.Struct, frozen=True):
    """One sequence of elements of one width."""

    encoding: Literal["sparse", "full"]
    nbytes: int  # of one element
    block: int  # elements of a block
    segments: tuple[Segment, ...]
    blocks: tuple[tuple[int, ...], ...]  # stored bytes of each plane

    @property
    def count(self) -> int:
        """Elements of all segments."""
        return sum(segment.count for segment in self.segments)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a part says of itself."""

    base: int  # the version it starts from
    version: int  # the version it leads to
    part: int  # 0, 1, ...
    last: bool
    removed: tuple[str, ...] = ()  # tensors of the base that the version has not; in part 0
    groups: tuple[Group, ...] = ()


class DeltaPart(NamedTuple):
    """A part whose bytes and header were checked."""

    header: Header
    payload: memoryview

    def planes(self) -> Iterator[list[list[memoryview]]]:
        """Per group, per block, the stored planes."""
        offset = 0
        for group in self.header.groups:
            blocks: list[list[memoryview]] = []
            for lengths in group.blocks:
                blocks.append([])
                for length in lengths:
                    blocks[-1].append(self.payload[offset : offset + length])
                    offset += length
            yield blocks


def join_part(header: Header, payload: list[bytes]) -> bytes:
    """The file of a part."""
    plain = msgspec.json.encode(header)
    stored = compress(plain)
    pieces = [_PREFIX.pack(MAGIC, len(stored), len(plain)), stored, *payload]
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return b"".join([*pieces, hasher.digest()])


def split_part(buffer: Any) -> DeltaPart:
    """Check the bytes of a part and read its header; a view, nothing is copied.

    Raises: DamagedDelta: a byte differs from what was encoded, or the header contradicts itself or the payload.
    """
    whole = memoryview(buffer).cast("B")
    if len(whole) < _PREFIX.size + _DIGEST_BYTES:
        raise _damaged(f"{len(whole)} bytes", "is cut")
    body = whole[:-_DIGEST_BYTES]
    if xxhash.xxh3_128_digest(body) != whole[-_DIGEST_BYTES:]:
        raise _damaged(xxhash.xxh3_128_hexdigest(body), f"must have the checksum {whole[-_DIGEST_BYTES:].hex()}")
    magic, stored, plain = _PREFIX.unpack_from(body)
    payload_at = _PREFIX.size + stored
    if magic != MAGIC or payload_at > len(body) or plain > MAX_HEADER_BYTES:
        raise _damaged(magic.hex(), "does not start as a delta part does")
    try:
        header = msgspec.json.decode(decompress(body[_PREFIX.size : payload_at], plain), type=Header)
    except msgspec.DecodeError as error:
        raise _damaged("its header", f"cannot be read ({error})") from error
    part = DeltaPart(header, body[payload_at:])
    _check(part)
    return part


def _check(part: DeltaPart) -> None:
    stored = 0
    for group in part.header.groups:
        for segment in group.segments:
            _check_segment(group, segment)
        if not 0 < group.block <= MAX_BLOCK or len(group.blocks) != -(-group.count // group.block):
            raise _damaged(f"{len(group.blocks)} blocks", f"must hold {group.count} elements, {group.block} in each")
        num_planes = SPARSE_PLANES if group.encoding == "sparse" else group.nbytes
        for lengths in group.blocks:
            if len(lengths) != num_planes or min(lengths) < 0:
                raise _damaged(f"planes of {lengths} bytes", f"cannot hold elements of {group.nbytes} bytes")
            stored += sum(lengths)
    if stored != len(part.payload):
        raise _damaged(f"{len(part.payload)} bytes of payload", f"must be {stored}")


def _check_segment(group: Group, segment: Segment) -> None:
    known = segment.dtype in ELEMENTS and segment.element.nbytes == group.nbytes
    whole = min(segment.shape, default=0) >= 0 and segment.num_elements <= MAX_ELEMENTS
    # Only a tensor without elements has a segment without elements.
    empty = group.encoding == "full" and segment.num_elements == 0 == segment.count
    fits = segment.start >= 0 and 0 < segment.count <= segment.num_elements - segment.start
    if not known or not whole or not (fits or empty):
        raise _damaged(f"{segment.name} {segment.dtype} {segment.shape}", f"cannot hold {segment.count} elements")


def _damaged(value: str, rule: str) -> DamagedDelta:
    return DamagedDelta("delta part", value, rule, "fetch the part again; if it stays, fetch the version in full")
