"""A weight store over HTTP: the trainer's, a relay's, or a foreign one of the same paths."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astraflow.errors import Unreachable, WeightError, WireError
from astraflow.weights.app import Listing
from astraflow.weights.fetch.route import TRIES, Lease
from astraflow.weights.fetch.spool import MIN_BYTES, collected
from astraflow.weights.manifest import MANIFEST, Delta, FileEntry, Manifest, Part, decoded, read_delta, read_manifest
from astraflow.weights.plan import VersionInfo, by_version
from astraflow.wire.client import HttpClient

_PAUSE_S = 0.2
FLOOR_BYTES_PER_S = 10_000
"""A store from which less comes, for as long as the client waits for an answer, is left for the next one."""


class SlowStore(WeightError):
    """Bytes come, but so few that other stores are tried first."""


class _Pace:
    """Of one download: looks at the rate once per `window_s`."""

    def __init__(self, entry: Part | FileEntry, filled: int, window_s: float) -> None:
        self._entry, self._window_s = entry, window_s
        self._since, self._before = time.monotonic(), filled

    def look(self, filled: int) -> None:
        """So many bytes are there. Raises: SlowStore."""
        seconds = time.monotonic() - self._since
        if seconds < self._window_s:
            return
        if filled - self._before < FLOOR_BYTES_PER_S * seconds:
            raise SlowStore(
                f"part {self._entry.name}", f"{filled} bytes",
                f"comes with fewer than {FLOOR_BYTES_PER_S} bytes/s in {seconds:.0f} s and another store is there",
                "check the connection",
            )  # fmt: skip
        self._since, self._before = time.monotonic(), filled


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
        goes on. `leave`: a part that comes slower than FLOOR_BYTES_PER_S is a SlowStore."""
        self._client, self._path, self._policy, self._spool = client, path, policy, spool
        self._closed, self._on_retry, self._leave = closed or threading.Event(), on_retry, leave

    def infos(self) -> dict[int, VersionInfo]:
        """What can be fetched."""
        _, payload, _ = self._client.get_bytes("GET", self._path)
        where = f"{self._client.base_url}{self._path}"
        return by_version(decoded(payload, Listing, where).infos, where)

    def manifest(self, version: int, wait_s: float = 0.0) -> Manifest:
        """Waits up to `wait_s` for a version that is newer than all that the store has."""
        path = f"{self._path}/{version}/{MANIFEST}"
        asked = f"{path}?wait_s={wait_s:g}" if wait_s else path
        _, payload, _ = self._client.get_bytes("GET", asked, wait_s=wait_s)
        return read_manifest(payload, self._policy, version, f"{self._client.base_url}{path}")

    def read(self, version: int, entry: Part | FileEntry) -> Any:
        """All bytes of a part in one buffer, going on where a cut download ended, also one of a process that died."""
        path = f"{self._path}/{version}/{entry.name}"
        return collected(self._spool, entry, lambda *target: self._download(path, entry, *target), MIN_BYTES)

    def _download(
        self, path: str, entry: Part | FileEntry, target: memoryview, filled: int, on_piece: Callable[[int], None]
    ) -> None:
        tries, reason = 0, "the connection was cut, or silent"
        pace = _Pace(entry, filled, self._client.timeout_s) if self._leave else None

        def came(now: int) -> None:
            on_piece(now)
            if pace is not None:
                pace.look(now)

        while filled < entry.nbytes:
            before = filled
            try:
                filled = self._client.download(path, target, filled, came)
            except Unreachable as error:
                reason = str(error)
            if filled < entry.nbytes:
                if pace is not None:
                    pace.look(filled)
                self._on_retry()
                tries = 0 if filled > before else tries + 1
                if tries >= TRIES:
                    raise WeightError(
                        f"part {entry.name}", f"{filled} bytes",
                        f"must have {entry.nbytes} and no byte came in {tries} tries of up to "
                        f"{self._client.timeout_s:g} s each ({reason})",
                        "check the connection and the disk of the store",
                    )  # fmt: skip
                self._closed.wait(_PAUSE_S * tries)

    def merged(self, version: int, base: int) -> Delta | None:
        """One delta from `base` to `version`; None: a store that does not merge."""
        path = f"{self._path}/{version}/delta?base={base}"
        try:
            _, payload, _ = self._client.get_bytes("GET", path)
        except WireError as error:
            if error.status == 404:
                return None
            raise
        return read_delta(payload, version, base, f"{self._client.base_url}{path}")

    def reading(self, version: int) -> contextlib.AbstractContextManager[Lease]:
        """The server keeps what it has just described."""
        return contextlib.nullcontext(_ServersLease())
