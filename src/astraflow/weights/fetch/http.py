"""A weight store over HTTP: the trainer's, a relay's, or a foreign one of the same paths."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astraflow.errors import Unreachable, WeightError, WireError
from astraflow.weights.app import Listing
from astraflow.weights.fetch.pace import MAX_DOCUMENT_BYTES, Pace
from astraflow.weights.fetch.route import TRIES, Lease
from astraflow.weights.fetch.spool import MIN_BYTES, collected
from astraflow.weights.manifest import MANIFEST, Delta, FileEntry, Manifest, Part, decoded, read_delta, read_manifest
from astraflow.weights.plan import VersionInfo, by_version
from astraflow.wire.client import HttpClient

_PAUSE_S = 0.2


class _ServersLease:
    """The server gives a lease with the manifest, and extends it while parts are read."""

    def extend(self) -> None: ...


class HttpReader:
    """The versions of one policy below `path` of a server."""

    def __init__(
        self, client: HttpClient, path: str, policy: str, *, spool: Path | None = None,
        closed: threading.Event | None = None, on_retry: Callable[[], None] = lambda: None, leave: bool = False,
    ) -> None:  # fmt: skip
        """`spool`: directory where large parts lie while they come. `closed`: ends waits. `on_retry`: a cut download
        goes on. `leave`: a part or document that comes slower than FLOOR_BYTES_PER_S is a SlowStore."""
        self._client, self._path, self._policy, self._spool = client, path, policy, spool
        self._closed, self._on_retry, self._leave = closed or threading.Event(), on_retry, leave

    def infos(self) -> dict[int, VersionInfo]:
        """What can be fetched."""
        where = f"{self._client.base_url}{self._path}"
        return by_version(decoded(self._document(self._path), Listing, where).infos, where)

    def manifest(self, version: int, wait_s: float = 0.0) -> Manifest:
        """Waits up to `wait_s` for a version that is newer than all that the store has."""
        path = f"{self._path}/{version}/{MANIFEST}"
        payload = self._document(f"{path}?wait_s={wait_s:g}" if wait_s else path, wait_s)
        return read_manifest(payload, self._policy, version, f"{self._client.base_url}{path}")

    def read(self, version: int, entry: Part | FileEntry) -> Any:
        """All bytes of a part in one buffer, going on where a cut download ended, also one of a process that died."""
        path = f"{self._path}/{version}/{entry.name}"
        return collected(self._spool, entry, lambda *target: self._download(path, entry, *target), MIN_BYTES)

    def _download(
        self, path: str, entry: Part | FileEntry, target: memoryview, filled: int, on_piece: Callable[[int], None]
    ) -> None:
        tries, furthest, reason = 0, filled, "the connection was cut, or silent"
        pace, last = Pace(f"part {entry.name}", self._client.timeout_s, leave=self._leave), filled
        pace.look()

        def took(now: int) -> None:
            nonlocal last
            before, last = last, now
            on_piece(now)
            pace.came(now - before if now > before else now)

        while filled < entry.nbytes:
            try:
                filled = self._client.download(path, target, filled, took, lambda n: pace.look())
            except Unreachable as error:
                reason = str(error)
            if filled < entry.nbytes:
                self._on_retry()
                # A server that knows no Range begins at the first byte again: that is no progress.
                tries, furthest = (0, filled) if filled > furthest else (tries + 1, furthest)
                if tries >= TRIES:
                    raise WeightError(
                        f"part {entry.name}", f"{filled} bytes",
                        f"must have {entry.nbytes} and no byte came in {tries} tries of up to "
                        f"{self._client.timeout_s:g} s each ({reason})",
                        "check the connection and the disk of the store",
                    )  # fmt: skip
                pace.look()
                self._closed.wait(_PAUSE_S * max(1, tries))

    def _document(self, path: str, wait_s: float = 0.0) -> memoryview:
        """A listing, a manifest, what a merged delta is made of."""
        what = f"answer of {self._client.base_url}{path}"
        pace = Pace(what, self._client.timeout_s, leave=self._leave, most=MAX_DOCUMENT_BYTES)
        return self._client.get_bytes("GET", path, wait_s=wait_s, on_bytes=pace.came)[1]

    def merged(self, version: int, base: int) -> Delta | None:
        """One delta from `base` to `version`; None: a store that does not merge."""
        path = f"{self._path}/{version}/delta?base={base}"
        try:
            payload = self._document(path)
        except WireError as error:
            if error.status == 404:
                return None
            raise
        return read_delta(payload, version, base, f"{self._client.base_url}{path}")

    def reading(self, version: int) -> contextlib.AbstractContextManager[Lease]:
        """The server keeps what it has just described."""
        return contextlib.nullcontext(_ServersLease())
