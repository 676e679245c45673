"""Bulk bodies on one host go through files of the run directory instead of a socket.

```
 put:  client ─ writes ─► dataflow/inbox/<random name> ─ one request with the name ─► checked, renamed to a segment
 get:  service ─ answers with (segment, offset, length, rows) ─► client maps dataflow/segments/<number>.arrow
```

So the bytes of a commit are written once, where they stay, and those of a batch are not moved at all. Both sides must
run as the same user under the same kernel boot, and the client must see the very directory (device and inode) that the
service speaks of; otherwise the bytes take the socket. What a client left in the inbox is swept. Small bodies are
quicker inline. Names are random, the inbox is private to the user, and the token rules still hold.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote

from astraflow.config.env import shared_memory_allowed
from astraflow.errors import JournalError, SchemaError

HOST_HEADER = "x-astraflow-host"  # of a request: the client's `host_identity`
INBOX_HEADER = "x-astraflow-inbox"  # of an answer: a place that takes bodies
BODY_HEADER = "x-astraflow-body"  # of a request: the name of its body in the inbox
MIN_BYTES = 1 << 20
_LEFTOVER_S = 120.0
_SWEEP_S = 30.0
_NAME = re.compile(r"[0-9a-f]{32}")
MOST_PIECES = 512  # of one system call; the limit of Linux is 1024


@cache
def host_identity() -> str:
    """Equal for two processes that may share files; "" where that is not possible or not wanted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""
    if not shared_memory_allowed():
        return ""
    return hashlib.sha256(f"{boot}:{os.getuid()}".encode()).hexdigest()[:32]


def place_of(directory: Path) -> str:
    """How an existing directory is called in a header."""
    seen = directory.stat()
    return f"{seen.st_dev}:{seen.st_ino}:{quote(str(directory.resolve()))}"


def open_place(text: str) -> Path | None:
    """The directory that `place_of` named, or None when this process does not see it."""
    device, _, rest = text.partition(":")
    inode, _, path = rest.partition(":")
    directory = Path(unquote(path))
    try:
        seen = directory.stat()
    except OSError:
        return None
    same = (str(seen.st_dev), str(seen.st_ino), seen.st_uid) == (device, inode, os.getuid())
    return directory if same and stat.S_ISDIR(seen.st_mode) else None


def put(place: Path, pieces: Sequence[memoryview]) -> str | None:
    """Write a body into an inbox; returns its name, or None when it cannot be written (send it inline then)."""
    name = secrets.token_hex(16)
    path = place / name
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        _write(file, pieces)
    except OSError:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(file)
    return name


def _write(file: int, pieces: Sequence[memoryview]) -> None:
    size = sum(piece.nbytes for piece in pieces)
    os.posix_fallocate(file, 0, size)  # a third less time than growing (measured on ext4)
    views = [piece for piece in pieces if piece.nbytes]
    while views:
        views = after(views, os.writev(file, views[:MOST_PIECES]))


def after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` (none empty) when the first bytes are gone."""
    done = 0
    while done < len(views) and num_bytes >= views[done].nbytes:
        num_bytes -= views[done].nbytes
        done += 1
    left = views[done:]
    if num_bytes:
        left[0] = left[0].cast("B")[num_bytes:]
    return left


class Body:
    """The body of a request. In a `with` block: its file, if it has one and nobody moved it, is gone afterwards."""

    def __init__(self, view: memoryview, path: Path | None = None) -> None:
        self.view, self.path = view, path

    def __enter__(self) -> Body:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Inbox:
    """The directory of a service into which clients on the same host write bodies."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory.resolve()
        self._swept = time.monotonic()
        self.place = place_of(directory)
        self._sweep(0.0)

    def take(self, name: str) -> Body:
        """Map the body called `name`.

        Raises: SchemaError: no such body (taken before, swept, or never there).
        """
        if time.monotonic() - self._swept > _SWEEP_S:
            self._swept = time.monotonic()
            self._sweep(_LEFTOVER_S)
        if not _NAME.fullmatch(name):
            raise SchemaError(BODY_HEADER, name, "must be 32 hexadecimal digits", "send the name that put() gave")
        path = self._directory / name
        try:
            return Body(_map(path), path)
        except OSError as error:
            raise SchemaError(
                BODY_HEADER, name, f"cannot be opened ({error.strerror})", "send the request again"
            ) from error

    def draft(self) -> Draft:
        """A new body that comes over a socket; use it in a `with` block."""
        return Draft(self._directory / secrets.token_hex(16))

    def _sweep(self, older_s: float) -> None:
        now = time.time()
        for entry in os.scandir(self._directory):
            with suppress(FileNotFoundError):  # its writer took it back
                if _NAME.fullmatch(entry.name) and now - entry.stat(follow_symlinks=False).st_mtime >= older_s:
                    os.unlink(entry.path)


class Draft:
    """A file of the inbox that is being written. When its block ends without `body`, it is gone.

    Raises: JournalError: the disk is full or failed.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, False

    def __enter__(self) -> Draft:
        with _full(self._path):
            self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)
        if not self._kept:
            self._path.unlink(missing_ok=True)

    def write(self, piece: memoryview) -> None:
        """Add bytes at the end."""
        with _full(self._path):
            while piece:
                piece = piece[os.write(self._file, piece) :]

    def body(self) -> Body:
        """It is complete."""
        body = Body(_map(self._path), self._path)
        self._kept = True
        return body


@contextmanager
def _full(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(
            "inbox", str(path.parent), f"cannot be written ({error.strerror})",
            "make room on the disk; the request is repeated by its sender",
        ) from error  # fmt: skip


def _map(path: Path) -> memoryview:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.getuid():
            raise OSError(0, "it is not a file of this user")
        return memoryview(mmap.mmap(file, seen.st_size, access=mmap.ACCESS_READ)) if seen.st_size else memoryview(b"")
    finally:
        os.close(file)
