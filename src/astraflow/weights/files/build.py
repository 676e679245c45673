"""A version while it is made: what it contains, and the files by which it will travel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from astraflow.durable import sync_path
from astraflow.errors import WeightError
from astraflow.weights.delta.merge import merge
from astraflow.weights.files.layout import index_json, plan_parts, write_file, write_part
from astraflow.weights.manifest import INDEX, MANIFEST, Delta, FileEntry, Manifest, Part, TensorEntry, is_file_name
from astraflow.weights.tensors import checksum

MIN_UNCHANGED = 0.5
"""Share of a model's elements. With fewer unchanged, a delta costs more time than it saves bytes."""


class Base(NamedTuple):
    """An earlier version as its publisher still holds it; the tensors do not change any more."""

    version: int
    tensors: Mapping[str, Any]
    checksums: Mapping[str, str]  # xxh3 by tensor name

    def delta(self, version: int, tensors: Mapping[str, Any]) -> Iterable[bytes] | None:
        """Parts of the delta to `version`, as they become ready; None: too much changed."""
        from astraflow.weights.delta.encode import encode, share_unchanged

        if share_unchanged(self.tensors, tensors) < MIN_UNCHANGED:
            return None
        return encode(self.tensors, tensors, base=self.version, version=version)


class Encoded(NamedTuple):
    """An earlier version of which its publisher holds nothing any more but the delta to the one that is published."""

    version: int
    checksums: Mapping[str, str]
    parts: Sequence[bytes]

    def delta(self, version: int, tensors: Mapping[str, Any]) -> Iterable[bytes] | None:
        """See `Base`."""
        return self.parts


AnyBase = Base | Encoded
"""What the next version can travel as the changes of."""


class Building:
    """The parts of one version. `content`: its manifest without them."""

    def __init__(
        self, policy: str, version: int, raw: Mapping[str, tuple[TensorEntry, memoryview]],
        files: Mapping[str, bytes], *, sync: bool,
    ) -> None:  # fmt: skip
        self._raw, self._contents, self._sync = raw, files, sync
        entries = [entry for entry, _ in raw.values()]
        self._planned = plan_parts(entries)
        self._parts: tuple[Part, ...] = ()
        described = tuple(FileEntry(name, len(data), checksum(data)) for name, data in files.items())
        self.content = Manifest(
            policy=policy, version=version, parent=-1, tensors=tuple(entries), parts=(), files=described
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.content.tensors)

    def write_delta(self, place: Path, base: AnyBase, tensors: Mapping[str, Any]) -> Delta | None:
        """The changes from `base`; None, and no file, when they are not fewer bytes than all tensors."""
        encoded = base.delta(self.content.version, tensors)
        if encoded is None:
            return None
        parts: list[FileEntry] = []
        for part in _write_numbered(place, "delta", encoded, sync=self._sync):
            parts.append(part)
            if sum(part.nbytes for part in parts) >= self.nbytes:
                for written in parts:
                    (place / written.name).unlink()
                return None
        return Delta(base.version, tuple(parts))

    def write_full(self, place: Path) -> None:
        """All tensors, as safetensors files."""
        buffers = {name: view for name, (_, view) in self._raw.items()}
        self._parts = tuple(write_part(place, name, group, buffers, sync=self._sync) for name, group in self._planned)

    def close(self, place: Path, previous: Path | None, parent: int, delta: Delta | None) -> None:
        """The config and tokenizer files, then the manifest. `previous`: the version before, for files that did not
        change: an equal one becomes a second name, not a second copy."""
        files = list(self.content.files)
        contents = dict(self._contents)
        if len(self._parts) > 1:
            index = index_json(self._planned)
            contents[INDEX] = index
            files.append(FileEntry(INDEX, len(index), checksum(index)))
        for file in files:
            _place_file(place / file.name, contents[file.name], previous, sync=self._sync)
        manifest = msgspec.structs.replace(
            self.content, parent=parent, parts=self._parts, delta=delta, files=tuple(files)
        )
        write_file(place / MANIFEST, [memoryview(msgspec.json.encode(manifest))], sync=self._sync)
        if self._sync:
            sync_path(place)


def merge_into(place: Path, base: int, deltas: list[list[Any]]) -> Delta:
    """The sum of `deltas` (oldest first, all parts of each) as files in `place`; as it lies there, if it was made."""
    described = place / f"merged-{base}.json"
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(described.read_bytes(), type=Delta)
    # Two who merge at once write the same bytes under names of their own; the last one to finish describes its own.
    names = f"merged-{base}-{os.urandom(4).hex()}"
    delta = Delta(base, tuple(_write_numbered(place, names, merge(deltas), sync=False)))
    temporary = place / f"{names}.json"
    write_file(temporary, [memoryview(msgspec.json.encode(delta))], sync=False)
    os.rename(temporary, described)
    return delta


def _write_numbered(place: Path, name: str, parts: Iterable[bytes], *, sync: bool) -> Iterator[FileEntry]:
    for number, part in enumerate(parts):
        entry = FileEntry(f"{name}-{number:05d}.bin", len(part), checksum(part))
        write_file(place / entry.name, [memoryview(part)], sync=sync)
        yield entry


def _place_file(path: Path, content: bytes, previous: Path | None, *, sync: bool) -> None:
    if previous is not None:
        with contextlib.suppress(OSError):
            before = previous / path.name
            if before.read_bytes() == content:
                os.link(before, path)
                return
    write_file(path, [memoryview(content)], sync=sync)


def read_files(files: Iterable[Path]) -> dict[str, bytes]:
    """Config and tokenizer files by name. Raises: WeightError: one that cannot lie beside weights."""
    contents: dict[str, bytes] = {}
    for path in files:
        if not is_file_name(path.name) or path.name == MANIFEST or path.name.endswith(".safetensors"):
            raise WeightError("file", str(path), "cannot lie beside weights", "give config and tokenizer files only")
        if path.name in contents:
            raise WeightError("file", str(path), "is given twice", "give each file name once")
        try:
            contents[path.name] = path.read_bytes()
        except OSError as error:
            raise WeightError(
                "file", str(path), f"cannot be read ({error.strerror})", "give an existing file"
            ) from error
    return contents
