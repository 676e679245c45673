"""Downloads that survive their process: what a killed reader had of a part is there when it starts again.

A part is written to `<directory>/<checksum of the part>`, through a shared mapping, so that every byte that came is in
the file when the process is killed. The last 8 bytes count those bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from astraflow.errors import WeightError
from astraflow.weights.manifest import FileEntry, Part, is_digest

log = logging.getLogger(__name__)
Download = Callable[[memoryview, int, Callable[[int], None]], None]
"""Fills a buffer from a position on, and says after each piece up to where it is filled."""

MIN_BYTES = 1 << 20
"""A smaller part is quicker fetched again than looked after."""

_COUNT = 8
DAY_S = 24 * 3600.0
LEFT_S = 600.0
"""A part to which no byte came for so long is left for good once a version came by other ways."""


class Spooled:
    """One part on its way. `target`: its bytes; `filled`: how many of them are there."""

    def __init__(self, directory: Path, checksum: str, nbytes: int) -> None:
        """Raises: BlockingIOError: another process fetches the same part. OSError: a full disk. WeightError: `checksum`
        is none, and would be a path."""
        if not is_digest(checksum):
            raise WeightError("checksum", checksum, "must be 32 hex digits", "ask another store")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = directory / checksum
        self._nbytes = nbytes
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_size != nbytes + _COUNT:
                os.ftruncate(self._fd, 0)
                if sys.platform == "darwin":
                    os.ftruncate(self._fd, nbytes + _COUNT)
                else:
                    os.posix_fallocate(self._fd, 0, nbytes + _COUNT)  # a full disk is said here, not by a fault later
            self._map = mmap.mmap(self._fd, nbytes + _COUNT)
        except BaseException:
            os.close(self._fd)
            raise
        self.target = memoryview(self._map)[:nbytes]
        self.filled = min(int.from_bytes(self._map[nbytes:], "little"), nbytes)

    def fill(self, filled: int) -> None:
        """So many bytes are there."""
        self._map[self._nbytes :] = filled.to_bytes(_COUNT, "little")
        self.filled = filled

    def take(self) -> mmap.mmap:
        """The finished part as a private (copy-on-write) mapping; its file is gone with the last use of that."""
        private = mmap.mmap(self._fd, self._nbytes, access=mmap.ACCESS_COPY)
        self._path.unlink(missing_ok=True)
        return private

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.target.release()
        self._map.close()
        os.close(self._fd)


def collected(spool: Path | None, entry: Part | FileEntry, download: Download, min_bytes: int = MIN_BYTES) -> Any:
    """All bytes of `entry` in one writable buffer; a large part lies in `spool` while it comes, and goes on from what
    is there."""
    spooled = _spooled(spool, entry) if spool is not None and entry.nbytes >= min_bytes else None
    if spooled is not None:
        with spooled:
            download(spooled.target, spooled.filled, spooled.fill)
            return spooled.take()
    try:
        target = np.empty(entry.nbytes, np.uint8).data  # not zeroed: saves a pass over all bytes
    except MemoryError as error:
        raise WeightError(
            f"part {entry.name}", f"{entry.nbytes} bytes", "does not fit in memory", "use a host that has more"
        ) from error
    download(target, 0, lambda filled: None)
    return target


def _spooled(spool: Path, entry: Part | FileEntry) -> Spooled | None:
    """None: another process fetches the same part, or there is no place: then it comes into memory."""
    try:
        return Spooled(spool, entry.xxh3, entry.nbytes)
    except BlockingIOError:
        return None
    except OSError as error:
        log.warning("spool=%s cannot be used (%s); a killed process starts its part again", spool, error.strerror)
        return None


def sweep(directory: Path, after_s: float = DAY_S) -> None:
    """Remove what nobody fetches now, and to which no byte came for `after_s`."""
    with contextlib.suppress(OSError):
        for item in list(os.scandir(directory)):
            with contextlib.suppress(OSError):
                if item.stat().st_mtime < time.time() - after_s:
                    _remove(item.path)


def _remove(path: str) -> None:
    """Raises: BlockingIOError: somebody fetches it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)
