"""What one weight version is made of: the record in `<policy>/<version>/manifest.json`.

`tensors` says what the content is; `parts` and `delta` say how it travels: whole, as changes of an earlier version, or
both. A version with parts is also an ordinary Hugging Face directory: they are safetensors files beside the config and
tokenizer files. Checksums are xxh3-128 in hex.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from astraflow.errors import WeightError
from astraflow.weights.plan import VersionInfo

R = TypeVar("R")

FORMAT = 1  # of a manifest, and of all that it describes; one without this number is 1
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"  # by which Hugging Face loaders find tensors in several files
DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
"""Safetensors dtype code -> (torch name, bytes per element)."""

_POLICY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_NBYTES = 1 << 44  # of one part or tensor: more is no weight but a lie
_MAX_DIMS = 64
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class TornPart(WeightError):
    """Bytes are not those that were published; fetching them again may help."""


class TensorEntry(msgspec.Struct, frozen=True):
    """Content of one tensor."""

    name: str  # Hugging Face name
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    xxh3: str  # of the raw little-endian bytes

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class Placement(msgspec.Struct, frozen=True):
    """Where a tensor's raw bytes lie in its part."""

    name: str
    offset: int  # bytes from the start of the part file
    nbytes: int


class Part(msgspec.Struct, frozen=True):
    """One file to fetch: a safetensors file that holds whole tensors."""

    name: str
    nbytes: int
    xxh3: str  # of the whole file
    tensors: tuple[Placement, ...]


class FileEntry(msgspec.Struct, frozen=True):
    """A file that is read as it is: a part of a delta, or what a node without the model directory needs (config,
    tokenizer, chat template)."""

    name: str
    nbytes: int
    xxh3: str


class Delta(msgspec.Struct, frozen=True):
    """The changes from version `base`; the format of its parts is that of `weights.delta`."""

    base: int  # 0 <= base < the version
    parts: tuple[FileEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its parts."""
        return sum(part.nbytes for part in self.parts)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable version of one policy. Produced by the trainer, consumed by nodes and relays."""

    policy: str
    version: int  # >= 0
    parent: int  # the version published before it; -1: none
    tensors: tuple[TensorEntry, ...]
    parts: tuple[Part, ...]  # empty: the version travels as a delta only
    delta: Delta | None = None
    files: tuple[FileEntry, ...] = ()
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        """Bytes of all full parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def info(self) -> VersionInfo:
        """How the version can travel."""
        full = self.nbytes if self.parts else -1
        if self.delta is None:
            return VersionInfo(self.version, full)
        return VersionInfo(self.version, full, self.delta.base, self.delta.nbytes)

    def same_content(self, other: Manifest) -> bool:
        """Equal tensors and files, however they are packed into parts."""
        return _content(self) == _content(other)

    def all_entries(self) -> list[Part | FileEntry]:
        """All files of the version but the manifest itself."""
        changes = () if self.delta is None else self.delta.parts
        return [*self.parts, *changes, *self.files]

    def entries(self) -> dict[str, TensorEntry]:
        """Tensor name -> entry."""
        return {entry.name: entry for entry in self.tensors}


class _Format(msgspec.Struct):
    format: int = 1


def _content(manifest: Manifest) -> tuple[frozenset[TensorEntry], frozenset[FileEntry]]:
    # The index file only names the parts, and the packing of equal content may change between releases.
    files = frozenset(f for f in manifest.files if f.name != INDEX)
    return frozenset(manifest.tensors), files


def read_manifest(payload: bytes | memoryview, policy: str, version: int, where: str) -> Manifest:
    """Decode and check a manifest that was read from `where`.

    Raises: TornPart: damaged. WeightError: of another format, policy or version.
    """
    if (found := decoded(payload, _Format, where, "manifest").format) != FORMAT:
        raise WeightError(
            "manifest.format", found, f"must be {FORMAT}", f"use the AstraFlow version that wrote {where}"
        )
    manifest = decoded(payload, Manifest, where)
    if (manifest.policy, manifest.version) != (policy, version):
        raise WeightError(
            where, f"{manifest.policy}/{manifest.version}", f"must be {policy}/{version}",
            "the URL leads to the weights of another run or policy",
        )  # fmt: skip
    _check(manifest, where)
    return manifest


def read_delta(payload: bytes | memoryview, version: int, base: int, where: str) -> Delta:
    """Decode and check a delta from `base` to `version` that a store made for us.

    Raises: TornPart: damaged, or another delta.
    """
    delta = decoded(payload, Delta, where)
    if delta.base != base or not 0 <= base < version:
        raise _torn(where, f"is a delta from version {delta.base}, not from {base} to {version}")
    _check_files(delta.parts, where)
    return delta


def decoded(payload: bytes | memoryview, kind: type[R], where: str, what: str = "") -> R:
    """What a store said, as a `kind` (or `what`, as it is called). Raises: TornPart: it is none."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _torn(where, f"is not a {what or kind.__name__.lower()} ({error})") from error


def _check_files(files: Sequence[Part | FileEntry], where: str) -> None:
    for file in files:
        if not is_file_name(file.name):
            raise _torn(where, f"names a file {file.name!r} that is not a plain name")
        if not is_digest(file.xxh3):
            raise _torn(where, f"gives {file.name} the checksum {file.xxh3[:40]!r}")
        if not 0 <= file.nbytes <= _MAX_NBYTES:
            raise _torn(where, f"gives {file.name} {file.nbytes} bytes")
    if len({file.name for file in files}) != len(files):
        raise _torn(where, "names a file twice")


def _check_tensors(tensors: Sequence[TensorEntry], where: str) -> None:
    for entry in tensors:
        if not is_digest(entry.xxh3):
            raise _torn(where, f"gives {entry.name} the checksum {entry.xxh3[:40]!r}")
        shape = entry.shape
        if entry.dtype not in DTYPES or len(shape) > _MAX_DIMS or not all(0 <= n <= _MAX_NBYTES for n in shape):
            raise _torn(where, f"describes {entry.name} as {entry.dtype} {shape[:_MAX_DIMS]}")
        if entry.nbytes > _MAX_NBYTES:
            raise _torn(where, f"gives {entry.name} {entry.nbytes} bytes")


def _check(manifest: Manifest, where: str) -> None:
    delta = manifest.delta
    _check_files(manifest.all_entries(), where)
    _check_tensors(manifest.tensors, where)
    entries = manifest.entries()
    placed = [place.name for part in manifest.parts for place in part.tensors]
    if len(entries) != len(manifest.tensors):
        raise _torn(where, "describes a tensor twice")
    if delta is not None and not 0 <= delta.base < manifest.version:
        raise _torn(where, f"has a delta from version {delta.base}")
    if sorted(placed) != sorted(entries) and (manifest.parts or delta is None):
        raise _torn(where, "does not place each tensor exactly once")
    for part in manifest.parts:
        end = 0
        for place in sorted(part.tensors, key=lambda place: (place.offset, place.nbytes)):
            if place.offset < end:
                raise _torn(where, f"places {place.name} on another tensor of {part.name}")
            end = place.offset + place.nbytes
            if place.nbytes != entries[place.name].nbytes or not 0 <= place.offset <= part.nbytes - place.nbytes:
                raise _torn(where, f"places {place.name} outside {part.name}")


def _torn(where: str, rule: str) -> TornPart:
    return TornPart("manifest", where, rule, "fetch it again; if it stays, publish the next version")


def is_digest(text: str) -> bool:
    """Whether `text` is a checksum, so that it may also name a file."""
    return _DIGEST.fullmatch(text) is not None


def is_policy_name(text: str) -> bool:
    """Whether `text` may name a policy (and so a directory)."""
    return _POLICY.fullmatch(text) is not None and ".." not in text


def is_file_name(text: str) -> bool:
    """Whether `text` is a plain file name inside a version's directory."""
    return _FILE.fullmatch(text) is not None
