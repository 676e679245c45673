"""Who uses a policy's directory: readers, whose leases keep a version from being deleted, and one publisher at a time.

A lease is `.readers/<version>.<unique>` whose modification time is its deadline, so that of a dead reader runs out.
Taking a lease and retiring versions exclude each other by a file lock, so what has a lease is there until it ends.
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
        with contextlib.suppress(OSError), _lock(self._path.parent, fcntl.LOCK_SH):
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
    """The versions that must stay; no lease is taken meanwhile. Raises BlockingIOError: somebody is just taking one."""
    with _lock(_folder(policy_dir), fcntl.LOCK_EX | fcntl.LOCK_NB):
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
        if item.name.startswith("."):
            continue
        version = item.name.partition(".")[0]
        with contextlib.suppress(FileNotFoundError):
            if item.stat().st_mtime > now:
                live.add(int(version))
            else:
                os.unlink(item.path)
    return live


@contextlib.contextmanager
def _lock(folder: Path, operation: int) -> Iterator[None]:
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, operation)
        yield
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
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(fd):  # flock has no deadline of its own
            if time.monotonic() > deadline:
                raise WeightError(
                    "weights lock", str(policy_dir / ".lock"), f"was held for {LOCK_WAIT_S:.0f} s",
                    "another trainer of this policy is publishing or hangs; end it",
                )  # fmt: skip
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
