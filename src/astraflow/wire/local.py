"""Bulk bodies on one host go through shared memory instead of a socket.

Two processes share memory when they see the same kernel boot and the same `/dev/shm` mount; every request carries that
identity, and a server that has the same one answers (or is sent) a file name instead of bytes. The receiver maps the
file and unlinks its name at once, so nothing stays behind a finished request; what a dead receiver leaves is swept
after a while. Small bodies are quicker inline. Names are random and private to the user; the token rules still hold.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import secrets
import threading
import time
from collections import deque
from functools import cache
from pathlib import Path

from astraflow.config.env import shared_memory_allowed
from astraflow.errors import SchemaError

HOST_HEADER = "x-astraflow-host"
BODY_HEADER = "x-astraflow-body"
MIN_BYTES = 1 << 20
_LEFTOVER_S = 120.0
_NAME = re.compile(r"[0-9a-f]{32}")
_ROOT = Path("/dev/shm")


@cache
def host_identity() -> str:
    """Equal for two processes exactly when they can share memory; "" where that is not possible or not wanted."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        mount = _ROOT.stat()
    except OSError:
        return ""
    if not shared_memory_allowed():
        return ""
    text = f"{boot}:{mount.st_dev}:{mount.st_ino}:{os.getuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class SharedBodies:
    """Bodies that this process put into shared memory; sweeps those that nobody took."""

    def __init__(self) -> None:
        self._given: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def put(self, body: memoryview) -> str | None:
        """Write `body`; returns its name, or None when memory is full (send it inline then)."""
        name = secrets.token_hex(16)
        path = _path(name)
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb", buffering=0) as file:
                written = 0
                while written < len(body):
                    written += file.write(body[written:])
        except OSError:
            path.unlink(missing_ok=True)
            return None
        with self._lock:
            self._given.append((time.monotonic() + _LEFTOVER_S, name))
        self.sweep()
        return name

    def sweep(self, everything: bool = False) -> None:
        """Drop what was given long ago and never taken (or all of it, at the end)."""
        with self._lock:
            while self._given and (everything or self._given[0][0] < time.monotonic()):
                _path(self._given.popleft()[1]).unlink(missing_ok=True)


def take(name: str) -> memoryview:
    """Map the body called `name` and unlink the name; the memory lives as long as the view.

    Raises: SchemaError: no such body (taken before, swept, or never ours).
    """
    if not _NAME.fullmatch(name):
        raise SchemaError(BODY_HEADER, name, "must be 32 hexadecimal digits", "send the name that put() gave")
    path = _path(name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise SchemaError(
            BODY_HEADER, name, f"cannot be opened ({error.strerror})", "send the request again"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        view = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    finally:
        os.close(descriptor)
    path.unlink(missing_ok=True)
    return view


def _path(name: str) -> Path:
    return _ROOT / f"astraflow-{os.getuid()}-{name}"
