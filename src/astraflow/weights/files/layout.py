"""Packing tensors into safetensors part files: plan, header, write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from astraflow.weights.manifest import DTYPES, Part, Placement, TensorEntry

PART_BYTES = 64 << 20
"""A part is closed at this size, so a cut download repeats little and a reader can check while it reads on."""

_ALIGN = 64


def plan_parts(entries: list[TensorEntry]) -> list[tuple[str, list[TensorEntry]]]:
    """Part file name -> its tensors, widest elements first so that every tensor is aligned to its element size."""
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in sorted(entries, key=lambda e: (-DTYPES[e.dtype][1], e.name)):
        if groups[-1] and size + entry.nbytes > PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    total = len(groups)
    return [(f"model-{i:05d}-of-{total:05d}.safetensors", group) for i, group in enumerate(groups, start=1)]


def index_json(parts: list[tuple[str, list[TensorEntry]]]) -> bytes:
    """The index by which Hugging Face loaders find the tensors of several part files."""
    weight_map = {entry.name: name for name, group in parts for entry in group}
    total = sum(entry.nbytes for _, group in parts for entry in group)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


def write_part(
    directory: Path, name: str, group: list[TensorEntry], raw: Mapping[str, memoryview], *, sync: bool
) -> Part:
    """Write one safetensors file."""
    header, placements = _header(group)
    hasher = xxhash.xxh3_128()
    nbytes = 0
    for piece in _pieces(header, group, raw):
        hasher.update(piece)
        nbytes += len(piece)
    write_file(directory / name, _pieces(header, group, raw), sync=sync)
    return Part(name, nbytes, hasher.hexdigest(), tuple(placements))


def _pieces(header: bytes, group: list[TensorEntry], raw: Mapping[str, memoryview]) -> Iterator[memoryview]:
    yield memoryview(header)
    for entry in group:
        yield raw[entry.name]


def _header(group: list[TensorEntry]) -> tuple[bytes, list[Placement]]:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in group:
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    header = len(text).to_bytes(8, "little") + text
    placements, offset = [], len(header)
    for entry in group:
        placements.append(Placement(entry.name, offset, entry.nbytes))
        offset += entry.nbytes
    return header, placements


def write_file(path: Path, pieces: Iterable[memoryview], *, sync: bool) -> None:
    """Write pieces to a new file; `sync`: wait until the disk has them."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            while piece:
                piece = piece[os.write(fd, piece) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
