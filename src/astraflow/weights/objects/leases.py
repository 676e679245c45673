"""Readers of an object store, whose leases keep a version from being deleted.

A reader writes a small object and writes it anew while it reads. Clocks of different hosts are never compared: who
deletes looks whether the object changed within the time that it names, by its own clock.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from astraflow.errors import WeightError
from astraflow.weights.objects.bucket import Bucket, MissingObject
from astraflow.weights.objects.layout import READERS

log = logging.getLogger(__name__)
LEASE_S = 60.0
MAX_LEASE_S = 600.0
"""What a lease can ask for; one that nobody renews ends then."""


class Note(msgspec.Struct, frozen=True):
    """The content of a lease."""

    seconds: float  # without a change for so long it is over
    count: int  # of changes


class ReaderLease:
    """One reader of one version. Without permission to write it keeps nothing: the version may go while it reads."""

    def __init__(self, bucket: Bucket, version: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket, self._clock = bucket, clock
        self._name = f"{READERS}/{version}.{uuid.uuid4().hex}.json"
        self._count = 0
        self._renew_at = float("-inf")
        self._written = False

    def extend(self) -> None:
        """Still reading; cheap to call often."""
        now = self._clock()
        if now < self._renew_at:
            return
        try:
            self._bucket.put(self._name, msgspec.json.encode(Note(LEASE_S, self._count)))
            self._written = True
        except WeightError as error:
            log.log(
                logging.DEBUG if self._count else logging.INFO,
                "reads without a lease, so a version may be deleted meanwhile: %s", error,
            )  # fmt: skip
        self._count += 1
        self._renew_at = now + LEASE_S / 4

    def release(self) -> None:
        """Give the lease back; one that cannot be deleted runs out."""
        if self._written:
            with contextlib.suppress(WeightError):
                self._bucket.remove(self._name)


@contextlib.contextmanager
def reading(bucket: Bucket, version: int) -> Iterator[ReaderLease]:
    """Hold a lease for the length of a block."""
    lease = ReaderLease(bucket, version)
    lease.extend()
    try:
        yield lease
    finally:
        lease.release()


@dataclass(frozen=True)
class _Seen:
    content: bytes
    until: float  # of our clock


class Readers:
    """The leases as the one who deletes sees them. `live` is to be called before each deletion."""

    def __init__(self, bucket: Bucket, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket, self._clock = bucket, clock
        self._seen: dict[str, _Seen] = {}

    def live(self) -> set[int]:
        """Versions that are being read; leases that have run out are deleted. Raises: WeightError: the store fails."""
        seen: dict[str, _Seen] = {}
        versions: set[int] = set()
        for name in self._bucket.names(READERS):
            version = name.removeprefix(f"{READERS}/").partition(".")[0]
            try:
                content = self._bucket.get(name)
            except MissingObject:
                continue  # given back meanwhile
            now, before = self._clock(), self._seen.get(name)
            if before is None or before.content != content:
                before = _Seen(content, now + _seconds(content))
            if before.until > now and version.isascii() and version.isdigit():
                seen[name] = before
                versions.add(int(version))
            else:
                self._bucket.remove(name)
        self._seen = seen
        return versions


def _seconds(content: bytes) -> float:
    try:
        asked = msgspec.json.decode(content, type=Note).seconds
    except msgspec.DecodeError:
        return LEASE_S
    return min(max(asked, 0.0), MAX_LEASE_S)
