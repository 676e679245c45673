"""The versions of one policy in an object store, as a reader sees them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astraflow.errors import WeightError
from astraflow.weights.fetch.pace import SILENT_S, Pace
from astraflow.weights.fetch.route import TRIES, Lease
from astraflow.weights.fetch.spool import MIN_BYTES, collected
from astraflow.weights.manifest import MANIFEST, Delta, FileEntry, Manifest, Part, TornPart, read_manifest
from astraflow.weights.objects.bucket import ANSWER_S, Bucket, MissingObject
from astraflow.weights.objects.layout import INDEX, Index, read_index, split_store_url
from astraflow.weights.objects.leases import reading
from astraflow.weights.plan import VersionInfo, by_version

MIN_CHUNK_BYTES, FIRST_CHUNK_BYTES, CHUNK_BYTES = 8 << 10, 512 << 10, 8 << 20
CHUNKS_AT_ONCE = 4
"""So that a request is answered within ANSWER_S, its chunks grow and shrink with what the link gives. One that gives
four of the smallest in that time, 728 bytes/s, is served; one that gives fewer than MIN_BYTES_PER_S is not (`Pace`)."""

_QUICK_S = ANSWER_S / 8  # twice as much then takes a quarter of what is allowed
_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
_Span = tuple[int, int]  # first byte and end


class ObjectReader:
    """A passive store: it serves what lies there, and merges no deltas."""

    def __init__(
        self, url: str, policy: str, *, spool: Path | None = None, closed: threading.Event | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`spool`: directory where large parts lie while they come. `closed`: ends waits. `on_retry`: a range is asked
        for again.

        Raises: WeightError: a package is missing, or the URL is one of another policy.
        """
        base, self._store_id = split_store_url(url)
        self._bucket, self._policy, self._spool = Bucket(base), policy, spool
        if base.rpartition("/")[2] != policy:
            raise WeightError("url", self._bucket.url, f"must end with /{policy}", "give the URL that was announced")
        self._closed, self._on_retry = closed or threading.Event(), on_retry
        self._chunk = FIRST_CHUNK_BYTES

    def is_meant(self) -> bool:
        """Whether the store that answers is the one that the URL means: a disk or memory of another host is not.

        Raises: WeightError: it does not answer.
        """
        try:
            index = self._index()
        except MissingObject:
            return not self._store_id
        return self._store_id in ("", index.store)

    def infos(self) -> dict[int, VersionInfo]:
        """What can be fetched, as the index says it."""
        try:
            return by_version(self._index().infos, f"{self._bucket.url}/{INDEX}")
        except MissingObject:
            return {}

    def manifest(self, version: int, wait_s: float = 0.0) -> Manifest:
        """Waits up to `wait_s` for a version that is newer than all that the store has."""
        deadline, pause_s = time.monotonic() + wait_s, _PAUSE_S
        name = f"{version}/{MANIFEST}"
        while True:
            try:
                return read_manifest(self._bucket.get(name), self._policy, version, f"{self._bucket.url}/{name}")
            except MissingObject as error:
                known = self.infos()
                left = deadline - time.monotonic()
                if left <= 0 or version <= max(known, default=-1) or self._closed.wait(min(pause_s, left)):
                    raise self._missing(version, known) from error
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def read(self, version: int, entry: Part | FileEntry) -> Any:
        """All bytes of a part in one buffer, going on where a read ended, also one of a process that died."""
        name = f"{version}/{entry.name}"
        try:
            return collected(self._spool, entry, lambda *target: self._download(name, entry, *target), MIN_BYTES)
        except MissingObject as error:
            raise self._missing(version, self.infos()) from error

    def merged(self, version: int, base: int) -> Delta | None:
        """None: the reader takes the deltas one after the other."""
        return None

    def reading(self, version: int) -> contextlib.AbstractContextManager[Lease]:
        """A lease, where this reader may write one."""
        return reading(self._bucket, version)

    def _index(self) -> Index:
        return read_index(self._bucket.get(INDEX), f"{self._bucket.url}/{INDEX}")

    def _download(
        self, name: str, entry: Part | FileEntry, target: memoryview, filled: int, on_piece: Callable[[int], None]
    ) -> None:
        tries, behind = 0, dict[int, int]()  # first byte -> end of chunks that came behind one that failed
        pace = Pace(f"part {entry.name}", SILENT_S)
        pace.look()
        while filled < entry.nbytes:
            spans = _gaps(filled, entry.nbytes, self._chunk, behind)
            failure, came = None, 0
            before, begin = filled, time.monotonic()
            for (start, stop), piece in zip(spans, self._bucket.ranges(name, spans), strict=False):
                if isinstance(piece, WeightError):
                    failure = failure or piece
                    continue
                if len(piece) != stop - start:
                    raise TornPart(
                        f"part {entry.name}", f"{start + len(piece)} bytes", f"must have {entry.nbytes}",
                        "the object is cut; fetch it again",
                    )  # fmt: skip
                target[start:stop] = piece
                behind[start] = stop
                came += len(piece)
            while filled in behind:
                filled = behind.pop(filled)
            if filled > before:
                on_piece(filled)
            if filled < entry.nbytes:
                pace.came(came)
            if failure is None:
                if time.monotonic() - begin < _QUICK_S:
                    self._chunk = min(2 * self._chunk, CHUNK_BYTES)
                continue
            self._chunk = max(self._chunk // 8, MIN_CHUNK_BYTES)
            tries = 1 if filled > before else tries + 1
            if isinstance(failure, MissingObject) or tries >= TRIES or self._closed.wait(_PAUSE_S * tries):
                raise failure
            self._on_retry()

    def _missing(self, version: int, known: dict[int, VersionInfo]) -> WeightError:
        have = f"it has {min(known)} to {max(known)}" if known else "it has none"
        return WeightError(
            f"{self._policy} version", version, f"is not in {self._bucket.url}",
            f"{have}; fetch the newest, or raise weights.keep",
        )  # fmt: skip


def _gaps(filled: int, nbytes: int, chunk: int, there: dict[int, int]) -> list[_Span]:
    """The next spans to ask for, around those that are `there`."""
    spans, at = list[_Span](), filled
    while at < nbytes and len(spans) < CHUNKS_AT_ONCE:
        if at in there:
            at = there[at]
            continue
        stop = min(at + chunk, nbytes, *(start for start in there if start > at))
        spans.append((at, stop))
        at = stop
    return spans
