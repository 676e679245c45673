"""Append-only files that hold the bodies of commits, read back through a memory map without a copy.

A body is written before the command that points at it is journaled, so a kill in between leaves bytes that nothing
points at: harmless, they go with their segment. A start never appends to an old segment. What a kill of the process
leaves is complete, since the page cache outlives it; a file cut short by a power failure is found when it is opened.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from astraflow.dataflow.machine.records import Put
from astraflow.errors import JournalError

SEGMENT_BYTES = 64 << 20
_ALIGN = 64  # of a body, so that its Arrow buffers are aligned in the map


class Segments:
    """`<directory>/<number>.arrow`. `live`: numbers that are needed; all other files are deleted."""

    def __init__(self, directory: Path, live: Iterable[Put], segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._limit = directory, segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        needed: dict[int, int] = {}
        for put in live:
            needed[put.segment] = max(needed.get(put.segment, 0), put.offset + put.length)
        self._check(needed)
        numbers = [int(p.stem) for p in directory.glob("*.arrow") if p.stem.isdecimal()]
        for number in set(numbers) - set(needed):
            self._path(number).unlink(missing_ok=True)
        self._maps: dict[int, pa.Buffer] = {}
        self._sealed: set[int] = set(needed)
        self._number = max([*numbers, *needed], default=0) + 1
        self._file = self._create(self._number)
        self._size = 0

    def append(self, body: bytes | memoryview) -> Put:
        """Write one body at the end.

        Raises: JournalError: the disk is full or failed; nothing was added.
        """
        if self._size >= self._limit:
            self._roll()
        offset = -(-self._size // _ALIGN) * _ALIGN
        view, written = memoryview(body).cast("B"), 0
        try:
            while written < len(view):
                written += os.pwrite(self._file, view[written:], offset + written)
        except OSError as error:
            self._truncate(self._size)
            raise JournalError(
                "segments", str(self._path(self._number)), f"cannot be written ({error.strerror})",
                "make room on the disk; the request is repeated by its sender",
            ) from error  # fmt: skip
        self._size = offset + len(view)
        return Put(self._number, offset, len(view))

    def undo(self, puts: Iterable[Put]) -> None:
        """Take back bodies whose commands could not be journaled (those at the end of the newest segment)."""
        starts = [p.offset for p in puts if p.segment == self._number]
        if starts:
            self._truncate(min(starts))

    def read(self, put: Put) -> pa.Buffer:
        """The body, as a view of the file."""
        mapped = self._maps.get(put.segment)
        if mapped is None or mapped.size < put.offset + put.length:
            mapped = self._maps[put.segment] = _map(self._path(put.segment))
        return mapped.slice(put.offset, put.length)

    def drop(self, number: int) -> None:
        """Nobody needs this segment; the one being written goes when it is full."""
        if number == self._number:
            return
        self._maps.pop(number, None)
        self._sealed.discard(number)
        self._path(number).unlink(missing_ok=True)

    def release_unneeded(self, needed: Iterable[int]) -> None:
        """Delete full segments that are not needed (those that emptied while they were written)."""
        for number in self._sealed - set(needed):
            self.drop(number)

    def close(self) -> None:
        """Close the file being written."""
        self._maps.clear()
        os.close(self._file)

    def _roll(self) -> None:
        try:
            file = self._create(self._number + 1)
        except OSError as error:
            raise JournalError(
                "segments", str(self._path(self._number + 1)), f"cannot be created ({error.strerror})",
                "make room on the disk; the request is repeated by its sender",
            ) from error  # fmt: skip
        os.close(self._file)
        self._sealed.add(self._number)
        self._file, self._number, self._size = file, self._number + 1, 0

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self._size = size
        self._maps.pop(self._number, None)

    def _create(self, number: int) -> int:
        return os.open(self._path(number), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.arrow"

    def _check(self, needed: dict[int, int]) -> None:
        for number, end in needed.items():
            path = self._path(number)
            size = path.stat().st_size if path.exists() else -1
            if size < end:
                raise JournalError(
                    "segments", str(path), f"must hold {end} bytes and has {max(size, 0)}",
                    "restore the file, or start the run again in a new directory",
                )  # fmt: skip


def _map(path: Path) -> pa.Buffer:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return pa.py_buffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)
