from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import pytest
import torch
import xxhash

from astraflow.weights.delta.format import DeltaPart, Header, join_part, split_part
from astraflow.weights.delta.order import flat_bits
from astraflow.weights.manifest import Manifest
from astraflow.weights.tensors import raw_tensors

Tensors = dict[str, torch.Tensor]


class Codec:
    """What the tests of this folder say often."""

    @staticmethod
    def manifest(version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        entries = tuple(entry for entry, _ in raw_tensors(tensors).values())
        return Manifest(policy="actor", version=version, parent=version - 1, tensors=entries, parts=())

    @staticmethod
    def copy(tensors: Tensors) -> Tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}

    @staticmethod
    def content(tensors: Tensors) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        """Names in order, dtypes, shapes and bits."""
        return [(n, str(t.dtype), tuple(t.shape), flat_bits(t).numpy().tobytes()) for n, t in tensors.items()]

    @staticmethod
    def forge(part: bytes, change: Callable[[Header], Header]) -> bytes:
        """A part with another header and right checksums: what a broken encoder would write."""
        found: DeltaPart = split_part(part)
        return join_part(change(found.header), [bytes(found.payload)])

    @staticmethod
    def flip(part: bytes, at: int, mask: int, *, seal: bool) -> bytes:
        """A part with bits of one byte flipped; `seal`: with the checksum of what it is now."""
        damaged = bytearray(part)
        damaged[at] ^= mask
        if seal:
            damaged[-16:] = xxhash.xxh3_128_digest(damaged[:-16])
        return bytes(damaged)

    @staticmethod
    def payload_at(part: bytes) -> int:
        """First byte behind the header."""
        _, stored, _ = struct.unpack_from("<4sII", part)
        return 12 + int(stored)


@pytest.fixture(scope="session")
def codec() -> Codec:
    return Codec()
