"""Append-only files that hold the bodies of commits, read back through a memory map without a copy.

A body is written before the command that points at it is journaled, so a kill in between leaves bytes that nothing
points at: harmless, they go with their segment. A start never appends to an old segment. What a kill of the process
leaves is complete, since the page cache outlives it; a file cut short by a power failure is found at the start.
A large body that lies in a file already becomes a segment of its own, without a copy.
A body is checked against its checksum when it is read first (33 GB/s measured, 0.8 ms for 25 MB).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import xxhash

from astraflow.dataflow.machine.records import Put
from astraflow.durable import sync_path
from astraflow.errors import JournalError
from astraflow.wire.local import MIN_BYTES, Body, place_of

SEGMENT_BYTES = 64 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_ALIGN = 64  # of a body, so that its Arrow buffers are aligned in the map


class DamagedRows(JournalError):
    """A body in a segment is not what was written."""

    def __init__(self, path: Path, put: Put) -> None:
        self.put = put
        super().__init__(
            "segments", str(path), f"is damaged between byte {put.offset} and {put.offset + put.length}",
            "the groups in it are dropped; check the disk",
        )  # fmt: skip


class SegmentGone(JournalError):
    """A file is gone: restored it costs nothing, so nobody goes on without being told to."""

    exit_code = 2  # starting again does not help

    def __init__(self, path: Path, num_puts: int) -> None:
        super().__init__(
            "segments", str(path), f"is gone, and the run needs it (bodies in files that are gone: {num_puts})",
            "restore it, or start once with --accept-damage to drop the groups in it",
        )  # fmt: skip


class ReadRowsDamaged(JournalError):
    """An operator read these rows when their group was complete: judged without them, steps would be forgotten."""

    exit_code = 2  # starting again does not help

    def __init__(self, found: DamagedRows, num_puts: int) -> None:
        super().__init__(
            "segments", found.value, f"is gone, or is damaged between byte {found.put.offset} and "
            f"{found.put.offset + found.put.length}, and an operator reads tokens there (such bodies: {num_puts})",
            "restore it, or start once with --accept-damage to drop the groups in it, and what was trained since",
        )  # fmt: skip


class Segments:
    """`<directory>/<number>.arrow`. Files of an earlier life stay until `keep_only` is called.

    Args: segment_bytes: a file that has grown so far gets a successor. fsync: `sync` does something.
    """

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES, *, fsync: bool = False) -> None:
        self._directory, self._limit, self._fsync = directory, segment_bytes, fsync
        directory.mkdir(parents=True, exist_ok=True)
        self.place = place_of(directory)
        numbers = [int(p.stem) for p in directory.glob("*.arrow") if p.stem.isdecimal()]
        self._maps: dict[int, pa.Buffer] = {}
        self._intact: dict[int, set[int]] = {}  # segment -> offsets of bodies that were checked
        self._sealed: set[int] = set(numbers)
        self._fresh: set[int] = set()  # segments with bodies that no applied command points at yet
        self._unsynced: list[int] = []  # files with bytes that may not be on the disk
        self._number = max(numbers, default=0) + 1
        self._next = self._number + 1
        self._file = self._create(self._number)
        self._size = 0

    def keep_only(self, live: Iterable[Put], *, accept_damage: bool = False) -> list[Put]:
        """Delete the files of earlier lives in which none of these puts lies.

        Returns: puts that are cut short, whose groups have to be dropped; with `accept_damage` also those of files that
        are gone. Raises: SegmentGone: a file that is needed is gone.
        """
        needed: dict[int, list[Put]] = {}
        for put in live:
            needed.setdefault(put.segment, []).append(put)
        gone = needed.keys() - self._sealed
        if gone and max(gone) >= self._number:  # this start took the number of such a file
            taken, self._next = self._number, max(gone) + 1
            self._roll()
            self.drop(taken)
        if gone and not accept_damage:
            raise SegmentGone(self._path(min(gone)), sum(len(needed[number]) for number in gone))
        for number in self._sealed - set(needed):
            self.drop(number)
        return [put for number, puts in needed.items() for put in puts if put.offset + put.length > self.size(number)]

    def store(self, body: Body) -> Put:
        """Keep the body of a request: its file becomes a segment, or its bytes are appended.

        Raises: JournalError: the disk is full or failed; nothing was added.
        """
        if body.path is None or len(body.view) < MIN_BYTES:
            return self.append(body.view)
        number, self._next = self._next, self._next + 1
        path = self._path(number)
        try:
            body.path.rename(path)
            if self._fsync:
                self._unsynced.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                sync_path(self._directory)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise JournalError(
                "segments", str(path), f"cannot be made of a body of the inbox ({error.strerror})",
                "make room on the disk; the request is repeated by its sender",
            ) from error  # fmt: skip
        self._sealed.add(number)
        self._fresh.add(number)
        return Put(number, 0, len(body.view), xxhash.xxh3_64_intdigest(body.view))

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
        self._fresh.add(self._number)
        if self._fsync and self._file not in self._unsynced:
            self._unsynced.append(self._file)
        return Put(self._number, offset, len(view), xxhash.xxh3_64_intdigest(view))

    def sync(self) -> None:
        """With `fsync`: what was appended is on the disk when it returns.

        Raises: JournalError: the disk failed.
        """
        while self._unsynced:
            try:
                os.fdatasync(self._unsynced[0])
            except OSError as error:
                raise JournalError(
                    "segments", str(self._directory), f"cannot be synced ({error.strerror})", "check the disk"
                ) from error
            file = self._unsynced.pop(0)
            if file != self._file:
                os.close(file)

    def undo(self, puts: Iterable[Put]) -> None:
        """Take back bodies whose commands could not be journaled: files of their own, and the end of the newest one."""
        ends = []
        for put in puts:
            if put.segment == self._number:
                ends.append(put.offset)
            elif put.offset == 0 and self.size(put.segment) == put.length:  # nothing else is in it
                self.drop(put.segment)
        if ends:
            self._truncate(min(ends))

    def settle(self) -> None:
        """The commands of all bodies so far were applied, or their bodies were taken back."""
        self._fresh.clear()

    def read(self, put: Put) -> pa.Buffer:
        """The body, as a view of the file.

        Raises: DamagedRows: it is not what was written.
        """
        mapped, end = self._maps.get(put.segment), put.offset + put.length
        if mapped is None or mapped.size < end:
            if self.size(put.segment) < end:
                raise DamagedRows(self._path(put.segment), put)
            mapped = self._maps[put.segment] = map_segment(self._path(put.segment))
        body = mapped.slice(put.offset, put.length)
        intact = self._intact.setdefault(put.segment, set())
        if put.offset not in intact:
            if put.sum and xxhash.xxh3_64_intdigest(body) != put.sum:
                raise DamagedRows(self._path(put.segment), put)
            intact.add(put.offset)
        return body

    def size(self, number: int) -> int:
        """Bytes of one segment."""
        path = self._path(number)
        return path.stat().st_size if path.exists() else 0

    @property
    def sealed(self) -> frozenset[int]:
        """Segments that are full and whose bodies the machine knows; the one being written is not among them."""
        return frozenset(self._sealed - self._fresh)

    def drop(self, number: int) -> None:
        """Nobody needs this sealed segment: delete it."""
        self._maps.pop(number, None)
        self._intact.pop(number, None)
        self._sealed.discard(number)
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file being written; an empty one would stand in the way of one that is put back."""
        self._maps.clear()
        if not self._size:
            self._path(self._number).unlink(missing_ok=True)
        for file in {*self._unsynced, self._file}:
            os.close(file)

    def _roll(self) -> None:
        try:
            file = self._create(self._next)
        except OSError as error:
            raise JournalError(
                "segments", str(self._path(self._next)), f"cannot be created ({error.strerror})",
                "make room on the disk; the request is repeated by its sender",
            ) from error  # fmt: skip
        if self._file not in self._unsynced:
            os.close(self._file)
        self._sealed.add(self._number)
        self._file, self._number, self._size = file, self._next, 0
        self._next += 1

    def _truncate(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self._size = size
        self._maps.pop(self._number, None)
        self._intact.pop(self._number, None)

    def _create(self, number: int) -> int:
        file = os.open(self._path(number), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        if self._fsync:
            sync_path(self._directory)
        return file

    def _path(self, number: int) -> Path:
        return self._directory / segment_name(number)


def segment_name(number: int) -> str:
    """Of the file."""
    return f"{number:06d}.arrow"


def map_segment(path: Path) -> pa.Buffer:
    """A read-only map of a whole segment. It needs no open file and outlives the name of the file.

    Python's own maps keep a file open; Arrow's walk through all pages first (0.2 ms for 25 MB, measured).
    Raises: OSError.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if not size:
            return pa.py_buffer(b"")
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(file)
    return pa.foreign_buffer(address, size, _Mapped(address, size))


class _Mapped:
    """Memory that is given back when the last buffer over it is gone."""

    def __init__(self, address: int, size: int) -> None:
        weakref.finalize(self, _LIBC.munmap, address, size).atexit = False  # somebody may still read at the exit
