"""One thin, thread-safe HTTP client for every service of a run; the only place on this seam that retries.

All requests of the protocol are idempotent, so a request whose answer was lost is sent again: a refused or reset
connection is retried with backoff until `give_up_s` has passed, then `Unreachable` names the URL and the wait.
So is a 507: the service lives and cannot write; what it said is raised when that goes on for `give_up_s`.
A service that accepts and never answers is cut by `timeout_s` and counts as unreachable. Bulk bodies are read with
`readinto` into one buffer (measured twice as fast as collecting pieces).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import urllib3

from astraflow.errors import ProtocolMismatch, Unauthorized, Unreachable, WireError
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.local import BODY_HEADER, HOST_HEADER, MIN_BYTES, SharedBodies, host_identity, take
from astraflow.wire.messages import PROTOCOL, PROTOCOL_HEADER, Failure

R = TypeVar("R")
DISK_FULL = 507
_PIECE = 1 << 20
"""urllib3's readinto reads into a buffer of its own first: a small one stays in the cache (measured: twice as fast)."""


class HttpClient:
    """Requests to one base URL. `token`: bearer token. `give_up_s`: how long an unreachable service is retried, and
    one whose disk is full."""

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
        if not self.base_url.startswith(("http://", "https://")):
            raise WireError(
                f"url={base_url!r} must start with http:// or https://; give the URL that the service printed"
            )
        self.timeout_s, self.give_up_s = timeout_s, give_up_s
        self.num_retries = 0
        self._stop = threading.Event()
        self._shared = SharedBodies()
        self._same_host = False  # learnt from the first answer
        self._headers = {PROTOCOL_HEADER: str(PROTOCOL)}
        if host_identity():
            self._headers[HOST_HEADER] = host_identity()
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(maxsize=max_connections, retries=False)

    def json(self, method: str, path: str, body: msgspec.Struct | None, reply: type[R], *, wait_s: float = 0.0) -> R:
        """Send a struct, get a struct. `wait_s`: how long the service itself may hold the request (long poll)."""
        data = msgspec.json.encode(body) if body is not None else None
        _, payload, _ = self._send(method, path, data, "application/json", wait_s)
        return self._decode(path, payload, reply)

    def post_bytes(self, path: str, data: bytes | memoryview, reply: type[R]) -> R:
        """Send an Arrow stream, get a struct. Large bodies go through shared memory on one host."""
        view = memoryview(data)
        if self._same_host and len(view) >= MIN_BYTES and (name := self._shared.put(view)) is not None:
            try:
                _, payload, _ = self._send("POST", path, b"", CONTENT_TYPE, 0.0, {BODY_HEADER: name})
                return self._decode(path, payload, reply)
            except WireError as error:  # the name was used up by a request whose answer was lost: send it inline
                if error.status != 422:
                    raise
        _, payload, _ = self._send("POST", path, view, CONTENT_TYPE, 0.0)
        return self._decode(path, payload, reply)

    def get_bytes(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        *,
        wait_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, memoryview, Mapping[str, str]]:
        """Status (200, 204 or 206), the body in one buffer, and the headers."""
        data = msgspec.json.encode(body) if body is not None else None
        return self._send(method, path, data, "application/json", wait_s, headers)

    def download(self, path: str, target: memoryview, offset: int = 0) -> int:
        """Read `path` from byte `offset` into `target[offset:]`; returns the bytes filled so far (short when cut)."""
        headers = {**self._headers, "range": f"bytes={offset}-"} if offset else dict(self._headers)
        response = None
        try:
            response = self._pool.request(
                "GET",
                self.base_url + path,
                headers=headers,
                preload_content=False,
                enforce_content_length=False,  # a cut body gives the bytes that came, not an error
                timeout=self._timeout(0.0),
            )
            if response.status >= 400:
                raise self._failure(path, response.status, response.read(decode_content=False))
            if offset and response.status != 206:
                offset = 0
            while offset < len(target):
                count = response.readinto(target[offset : offset + _PIECE])
                if not count:
                    break
                offset += count
        except urllib3.exceptions.HTTPError:
            if response is None:
                raise Unreachable(
                    f"url={self.base_url}{path} could not be reached; check that the service runs"
                ) from None
        finally:
            if response is not None:
                response.close() if offset < len(target) else response.release_conn()
        return offset

    def close(self) -> None:
        """End waits and drop connections."""
        self._stop.set()
        self._shared.sweep(everything=True)
        self._pool.clear()

    def _timeout(self, wait_s: float) -> urllib3.Timeout:
        return urllib3.Timeout(connect=min(10.0, self.timeout_s), read=self.timeout_s + wait_s)

    def _send(
        self,
        method: str,
        path: str,
        data: bytes | memoryview | None,
        content_type: str,
        wait_s: float,
        extra: Mapping[str, str] | None = None,
    ) -> tuple[int, memoryview, Mapping[str, str]]:
        headers = {**self._headers, "content-type": content_type, **(extra or {})}
        deadline = time.monotonic() + self.give_up_s
        attempt = 0
        failure: WireError
        cause: BaseException | None
        while True:
            try:
                return self._once(method, path, data, headers, wait_s)
            except urllib3.exceptions.HTTPError as error:
                failure, cause = self._unreachable(path, error), error
            except WireError as error:
                if error.status != DISK_FULL:
                    raise
                failure, cause = error, error.__cause__
            attempt += 1
            pause = min(2.0, 0.05 * 2**attempt) * random.uniform(0.5, 1.0)
            if time.monotonic() + pause > deadline or self._stop.wait(pause):
                raise failure from cause
            self.num_retries += 1

    def _unreachable(self, path: str, error: Exception) -> WireError:
        return Unreachable(
            f"url={self.base_url}{path} gave no answer in {self.give_up_s:.0f} s ({_reason(error)}); "
            "check that the service runs and that the URL and port are right"
        )

    def _once(
        self, method: str, path: str, data: bytes | memoryview | None, headers: Mapping[str, str], wait_s: float
    ) -> tuple[int, memoryview, Mapping[str, str]]:
        response = self._pool.request(
            method,
            self.base_url + path,
            body=data,  # type: ignore[arg-type]  # any buffer is sent as it is
            headers=headers,
            preload_content=False,
            timeout=self._timeout(wait_s),
        )
        try:
            payload = _read_all(response)
        finally:
            response.release_conn()
        if response.status >= 400:
            raise self._failure(path, response.status, payload)
        self._same_host = bool(host_identity()) and response.headers.get(HOST_HEADER) == host_identity()
        name = response.headers.get(BODY_HEADER)
        return response.status, payload if name is None else take(name), response.headers

    def _decode(self, path: str, payload: memoryview, reply: type[R]) -> R:
        try:
            return msgspec.json.decode(payload, type=reply)
        except msgspec.DecodeError as error:
            raise WireError(
                f"url={self.base_url}{path} answered no {reply} ({error}); is this an AstraFlow service?"
            ) from error

    def _failure(self, path: str, status: int, payload: memoryview | bytes) -> WireError:
        try:
            failure = msgspec.json.decode(payload, type=Failure)
        except msgspec.DecodeError:
            failure = Failure(f"url={self.base_url}{path} answered {status}; is this an AstraFlow service?")
        kind: Callable[[str, int], WireError] = {401: Unauthorized, 426: ProtocolMismatch}.get(status, WireError)
        return kind(failure.error, status)


def _read_all(response: urllib3.BaseHTTPResponse) -> memoryview:
    length = response.headers.get("content-length")
    if length is None:
        return memoryview(response.read(decode_content=False))
    size = int(length)
    buffer = memoryview(bytearray(size))
    filled = 0
    while filled < size:
        count = response.readinto(buffer[filled : filled + _PIECE])
        if not count:
            raise urllib3.exceptions.IncompleteRead(filled, size - filled)
        filled += count
    return buffer


def _reason(error: Exception) -> str:
    text = str(error)
    return text.split(": ", 1)[-1] if text else type(error).__name__
