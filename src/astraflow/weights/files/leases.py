"""Who uses a policy's directory: readers, whose leases keep a version from being deleted, and one publisher at a time.

A lease is `.readers/<version>.<unique>` whose modification time is its deadline, so that of a dead reader runs out.
Taking a lease and retiring versions exclude each other by a file lock, so what has a lease is there until it ends. Who
wants that lock passes a gate first, which retiring shuts: else a stream of readers would never leave the lock free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from astraflow.errors import WeightError

LEASE_S = 60.0
LOCK_WAIT_S = 30.0
_LOOK_S = 0.001
RETIRE_WAIT_S = 1.0  # longer, somebody hangs


def _folder(policy_dir: Path) -> Path:
    return policy_dir / ".readers"


class ReaderLease:
    """One reader of one version. `extend` while bytes flow, `release` at the end."""

    def __init__(self, policy_dir: Path, version: int, seconds: float = LEASE_S) -> None:
        self._path = _folder(policy_dir) / f"{version}.{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._seconds = seconds
        self._renew_at = 0.0

    def extend(self) -> None:
        """Move the deadline; cheap to call often. A directory that cannot be written has nothing to protect from us."""
        now = time.time()
        if now < self._renew_at:
            return
        with contextlib.suppress(OSError), _taking(self._path.parent):
            self._path.touch()
            os.utime(self._path, (now, now + self._seconds))
        self._renew_at = now + self._seconds / 4

    def release(self) -> None:
        """Give the lease back."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(policy_dir: Path, version: int, seconds: float = LEASE_S) -> Iterator[ReaderLease]:
    """Hold a lease for the length of a block."""
    lease = ReaderLease(policy_dir, version, seconds)
    lease.extend()
    try:
        yield lease
    finally:
        lease.release()


@contextlib.contextmanager
def retiring(policy_dir: Path) -> Iterator[set[int]]:
    """The versions that must stay; no lease is taken meanwhile.

    Raises: BlockingIOError: somebody has been taking one for RETIRE_WAIT_S.
    """
    folder = _folder(policy_dir)
    with _opened(folder / ".gate") as gate, _opened(folder / ".lock") as lock:
        deadline = time.monotonic() + RETIRE_WAIT_S
        if not (_locked_by(gate, deadline) and _locked_by(lock, deadline)):
            raise BlockingIOError
        yield leased_versions(policy_dir)


def leased_versions(policy_dir: Path) -> set[int]:
    """Versions with a live reader; leases that have run out are removed."""
    live: set[int] = set()
    now = time.time()
    try:
        found = list(os.scandir(_folder(policy_dir)))
    except FileNotFoundError:
        return live
    for item in found:
        version = item.name.partition(".")[0]
        if not (version.isascii() and version.isdigit()):
            continue  # a lock, or not ours
        with contextlib.suppress(FileNotFoundError):
            if item.stat().st_mtime > now:
                live.add(int(version))
            else:
                os.unlink(item.path)
    return live


@contextlib.contextmanager
def _taking(folder: Path) -> Iterator[None]:
    with _opened(folder / ".lock") as lock:
        with _opened(folder / ".gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A lock of it ends with the block."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def publishing(policy_dir: Path) -> Iterator[None]:
    """The publishers' lock: one at a time; it dies with its process.

    Raises: WeightError: the directory cannot be written, or the lock was held for LOCK_WAIT_S.
    """
    try:
        _folder(policy_dir).mkdir(parents=True, exist_ok=True)
        fd = os.open(policy_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise WeightError(
            "weights directory",
            str(policy_dir),
            f"cannot be written ({error.strerror})",
            "choose another run.directory",
        ) from error
    try:
        if not _locked_by(fd, time.monotonic() + LOCK_WAIT_S):
            raise WeightError(
                "weights lock", str(policy_dir / ".lock"), f"was held for {LOCK_WAIT_S:.0f} s",
                "another trainer of this policy is publishing or hangs; end it",
            )  # fmt: skip
        yield
    finally:
        os.close(fd)


def _locked_by(fd: int, deadline: float) -> bool:
    """flock has no deadline of its own."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(_LOOK_S)
