"""How far the log was acknowledged: one small file written in place after each transaction, without waiting for it.

SQLite drops everything behind a bad frame of its log without a word. With this number a start knows whether something
that was answered for is missing, and how much. It outlives `kill -9` as the log does; after a power failure it counts
only when commits are synced (`dataflow.fsync`), since the disk may have got it before the log.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

_PARTS = struct.Struct("<Q?32s")  # newest command, synced, boot
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Head(NamedTuple):
    """What the file says. `trusted`: the log must hold this command."""

    seq: int
    trusted: bool


class HeadFile:
    """The file, open for writing."""

    def __init__(self, path: Path, *, synced: bool) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        self._synced, self._boot = synced, _boot()

    def write(self, seq: int) -> None:
        """Command `seq` is in the log. In place and of one size, so a full disk cannot stop it."""
        content = _PARTS.pack(seq, self._synced, self._boot)
        os.pwrite(self._file, content + xxhash.xxh3_64_digest(content), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_head(path: Path) -> Head | None:
    """None: there is no such file, or it is damaged itself."""
    content = path.read_bytes() if path.exists() else b""
    if len(content) != _PARTS.size + 8 or xxhash.xxh3_64_digest(content[:-8]) != content[-8:]:
        return None
    seq, synced, boot = _PARTS.unpack(content[:-8])
    return Head(seq, synced or (boot == _boot() and boot.strip(b"\0") != b""))


def _boot() -> bytes:
    """Differs after each start of the machine; zeros where that cannot be known."""
    try:
        return _BOOT.read_text().strip().replace("-", "").encode().ljust(32, b"\0")
    except OSError:
        return bytes(32)
