"""One thin, thread-safe HTTP client for every service of a run; the only place on this seam that retries.

All requests of the protocol are idempotent, so a request whose answer was lost is sent again: a refused or reset
connection is retried with backoff until `give_up_s` has passed, then `Unreachable` names the URL and the wait.
So is a 507 (the service lives and cannot write) and a 503 (it stops, after the pause that it asks for); what it said is
raised when that goes on for `give_up_s`.
A service that accepts and never answers is cut by `timeout_s` and counts as unreachable.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from astraflow.errors import ProtocolMismatch, Unauthorized, Unreachable, WireError
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.connection import (
    FIRST_ERROR,
    MAX_ERROR_BYTES,
    Connection,
    Head,
    OnBytes,
    Pieces,
    Pool,
    size_of,
    unwatched,
)
from astraflow.wire.local import BODY_HEADER, HOST_HEADER, INBOX_HEADER, MIN_BYTES, host_identity, open_place, put
from astraflow.wire.messages import PROTOCOL, PROTOCOL_HEADER, Failure

R = TypeVar("R")
DISK_FULL, AWAY = 507, 503
_JSON = "application/json"
_CONNECT_S = 10.0
_PIECE = 1 << 18  # of a download, at most, after which it is said how much came
_LONGEST_PAUSE_S = 5.0  # whatever a service asks for


class HttpClient:
    """Requests to one base URL. `token`: bearer token. `give_up_s`: how long a service is retried that is unreachable,
    stops, or has no room on its disk."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        give_up_s: float = 10.0,
        max_connections: int = 8,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._pool = Pool(self.base_url, max_connections)
        self.timeout_s, self.give_up_s = timeout_s, give_up_s
        self.num_retries = 0
        self._stop = threading.Event()
        self._inbox = ""  # where the service takes bodies from files, learnt from its answers; "": it does not
        self._headers = {"host": self._pool.netloc, PROTOCOL_HEADER: str(PROTOCOL)}
        if host_identity():
            self._headers[HOST_HEADER] = host_identity()
        if token:
            self._headers["authorization"] = f"Bearer {token}"

    def json(self, method: str, path: str, body: msgspec.Struct | None, reply: type[R], *, wait_s: float = 0.0) -> R:
        """Send a struct, get a struct. `wait_s`: how long the service itself may hold the request (long poll)."""
        _, payload, _ = self._send(method, path, _json(body), {"content-type": _JSON}, wait_s)
        return self._decode(path, payload, reply)

    def post_stream(self, path: str, pieces: Sequence[memoryview], reply: type[R]) -> R:
        """Send an Arrow stream, get a struct. On one host a large body goes through a file (`wire.local`)."""
        if self._inbox and size_of(pieces) >= MIN_BYTES and (name := self._put(pieces)) is not None:
            try:
                _, payload, _ = self._send("POST", path, (), {"content-type": CONTENT_TYPE, BODY_HEADER: name})
                return self._decode(path, payload, reply)
            except WireError as error:  # the name was used up by a request whose answer was lost: send it inline
                if error.status != 422:
                    raise
        _, payload, _ = self._send("POST", path, pieces, {"content-type": CONTENT_TYPE})
        return self._decode(path, payload, reply)

    def _put(self, pieces: Sequence[memoryview]) -> str | None:
        place = open_place(self._inbox)
        name = put(place, pieces) if place is not None else None
        if name is None:
            self._inbox = ""  # not reachable from here, or full: the next answer may say it again
        return name

    def get_bytes(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        wait_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        on_bytes: OnBytes = unwatched,
    ) -> tuple[int, memoryview, Mapping[str, str]]:
        """Status (200, 204 or 206), the body in one buffer, and the headers (names in lower case)."""
        return self._send(method, path, _json(body), {"content-type": _JSON, **(headers or {})}, wait_s, on_bytes)

    def download(
        self, path: str, target: memoryview, offset: int = 0, on_piece: Callable[[int], None] | None = None,
        on_head: OnBytes = unwatched,
    ) -> int:  # fmt: skip
        """Read `path` from byte `offset` into `target[offset:]`; returns the bytes filled so far (short when cut).

        `on_piece`: told the bytes filled, after each piece; what it raises ends the download. `on_head`: told of bytes
        that come before the first of them.
        """
        headers = {**self._headers, "range": f"bytes={offset}-"} if offset else self._headers
        connection = None
        try:
            connection, head = self._ask("GET", path, (), headers, self.timeout_s, on_head)
            if head.status >= FIRST_ERROR:
                raise self._failure(path, head, connection.read_rest(head))
            connection.on_bytes = unwatched
            if offset and head.status != 206:
                offset = 0
            while offset < len(target):
                count = connection.read_some(target[offset : offset + _PIECE])
                if not count:
                    break
                offset += count
                if on_piece is not None:
                    on_piece(offset)
        except OSError:  # a cut body gives the bytes that came, not an error
            if connection is None:
                raise Unreachable(
                    f"url={self.base_url}{path} could not be reached; check that the service runs"
                ) from None
        finally:
            if connection is not None:
                self._pool.give(connection)
        return offset

    def close(self) -> None:
        """End waits and drop connections."""
        self._stop.set()
        self._pool.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Pieces,
        headers: Mapping[str, str],
        wait_s: float = 0.0,
        on_bytes: OnBytes = unwatched,
    ) -> tuple[int, memoryview, Mapping[str, str]]:
        headers = {name: value for name, value in {**self._headers, **headers}.items() if value}
        begin = time.monotonic()
        deadline = begin + self.give_up_s
        attempt = 0
        failure: WireError
        cause: BaseException | None
        while True:
            try:
                return self._once(method, path, body, headers, self.timeout_s + wait_s, on_bytes)
            except OSError as error:
                failure, cause = self._unreachable(path, error, time.monotonic() - begin), error
            except WireError as error:
                if error.status not in (DISK_FULL, AWAY):
                    raise
                failure, cause = error, error.__cause__
            attempt += 1
            pause = min(2.0, 0.05 * 2**attempt) * random.uniform(0.5, 1.0)
            if isinstance(failure, Unreachable):
                pause += min(failure.pause_s, _LONGEST_PAUSE_S)
            if time.monotonic() + pause > deadline or self._stop.wait(pause):
                raise failure from cause
            self.num_retries += 1

    def _unreachable(self, path: str, error: Exception, waited_s: float) -> WireError:
        return Unreachable(
            f"url={self.base_url}{path} gave no answer in {max(self.give_up_s, waited_s):.0f} s ({_reason(error)}); "
            "check that the service runs and that the URL and port are right"
        )

    def _once(
        self, method: str, path: str, body: Pieces, headers: Mapping[str, str], timeout_s: float, on_bytes: OnBytes
    ) -> tuple[int, memoryview, Mapping[str, str]]:
        connection, head = self._ask(method, path, body, headers, timeout_s, on_bytes)
        try:
            payload = connection.read_rest(head)
        finally:
            self._pool.give(connection)
        if head.status >= FIRST_ERROR:
            raise self._failure(path, head, payload)
        self._inbox = head.headers.get(INBOX_HEADER, "")
        return head.status, payload, head.headers

    def _ask(
        self, method: str, path: str, body: Pieces, headers: Mapping[str, str], timeout_s: float, on_bytes: OnBytes
    ) -> tuple[Connection, Head]:
        size = size_of(body)
        lines = [f"{method} {self._pool.prefix}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        if size or method not in ("GET", "DELETE"):
            lines.append(f"content-length: {size}")
        start = "\r\n".join([*lines, "", ""]).encode("latin-1")
        connection = self._pool.take(min(_CONNECT_S, self.timeout_s))
        try:
            return connection, connection.ask(start, body, timeout_s, on_bytes)
        except BaseException:
            connection.close()
            raise

    def _decode(self, path: str, payload: memoryview, reply: type[R]) -> R:
        try:
            return msgspec.json.decode(payload, type=reply)
        except msgspec.DecodeError as error:
            raise WireError(
                f"url={self.base_url}{path} answered no {reply} ({error}); is this an AstraFlow service?"
            ) from error

    def _failure(self, path: str, head: Head, payload: memoryview | bytes) -> WireError:
        status = head.status
        try:
            failure = msgspec.json.decode(payload, type=Failure)
        except msgspec.DecodeError:
            more = f" with {MAX_ERROR_BYTES} bytes or more" if len(payload) >= MAX_ERROR_BYTES else ""
            failure = Failure(f"url={self.base_url}{path} answered {status}{more}; is this an AstraFlow service?")
        if status == AWAY:
            pause = head.headers.get("retry-after", "")
            return Unreachable(failure.error, status, float(pause) if pause.isdecimal() else 0.0)
        kind: Callable[[str, int], WireError] = {401: Unauthorized, 426: ProtocolMismatch}.get(status, WireError)
        return kind(failure.error, status)


def _json(body: msgspec.Struct | None) -> Pieces:
    return () if body is None else (memoryview(msgspec.json.encode(body)),)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
