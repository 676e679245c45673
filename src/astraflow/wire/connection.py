"""One keep-alive HTTP/1.1 connection of a client: httptools parses heads, bodies go straight to where they belong.

A request leaves in one system call together with its body (`sendmsg` of the pieces), a body of known length is
received into the caller's buffer. Measured against urllib3 on loopback: a round trip takes 0.06 ms instead of 0.26 ms,
and the client copies no body.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools
import numpy as np

from astraflow.errors import WireError
from astraflow.wire.local import MOST_PIECES, after

Pieces = Sequence[memoryview]
OnBytes = Callable[[int], None]
"""Told of each arrival how many bytes it was; what it raises ends the request."""

FIRST_ERROR = 400  # of the statuses
_HEAD_BYTES = 64 << 10  # of one receive while the head is read
_MAX_HEAD_BYTES, _MOST_DIGITS = 1 << 20, 18
MAX_ERROR_BYTES = 1 << 20
"""Of the body of an answer that is an error; of a longer one so much is read, and the connection is closed."""


def size_of(pieces: Pieces) -> int:
    """Bytes."""
    return sum(piece.nbytes for piece in pieces)


def unwatched(num_bytes: int) -> None:
    """Nobody is told."""


def fresh(size: int) -> memoryview:
    """A buffer to be filled. Unlike a bytearray it is not set to zero first, and a large one takes huge pages."""
    return np.empty(size, np.uint8).data


class Broken(OSError):
    """The other side closed the connection, or does not speak HTTP."""


class Head(NamedTuple):
    """Status and headers of an answer."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    length: int | None  # bytes of the body; None: until its end is marked


class Connection:
    """A connection to `host`; one request at a time.

    Raises (every method): OSError: it could not be made, broke, or took longer than its timeout.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        self.on_bytes: OnBytes = unwatched  # of the request that runs
        self._early = bytearray()  # of the body, came with the head or out of chunks
        self._left: int | None = 0  # bytes of the body that the socket still has; None: as long as the parser says
        self._over = True  # the body is complete
        self._keep = False  # the other side goes on with this connection

    def ask(self, head: bytes, body: Pieces, timeout_s: float, on_bytes: OnBytes = unwatched) -> Head:
        """Send a request; what is answered before the body is sent completely is an answer too. `timeout_s`: without a
        byte. `on_bytes`: of the whole answer."""
        self._socket.settimeout(timeout_s)
        self.on_bytes = on_bytes
        try:
            self._send([memoryview(head), *body])
        except (BrokenPipeError, ConnectionResetError):
            answer = self._read_head()
            self._keep = False
            return answer
        return self._read_head()

    def readinto(self, target: memoryview) -> int:
        """Fill `target` from the body; fewer bytes than asked for only where the body ends or was cut."""
        filled = 0
        while filled < len(target) and (count := self.read_some(target[filled:])):
            filled += count
        return filled

    def read_some(self, target: memoryview) -> int:
        """What has come of the body, at least a byte, into `target`; 0: it ended or was cut."""
        while not self._early and not self._over and self._left is None:
            self._feed()
        if self._early:
            count = min(len(self._early), len(target))
            target[:count] = self._early[:count]
            del self._early[:count]
            return count
        if self._over or self._left is None:
            return 0
        count = self._socket.recv_into(target, min(len(target), self._left))
        self.on_bytes(count)
        self._left -= count
        self._over = not self._left
        return count

    def read_rest(self, head: Head) -> memoryview:
        """The whole body in one buffer; of an error MAX_ERROR_BYTES at most."""
        length = head.length
        if head.status >= FIRST_ERROR:
            length = MAX_ERROR_BYTES if length is None else min(length, MAX_ERROR_BYTES)
        if length is not None:
            buffer = fresh(length)
            filled = self.readinto(buffer)
            if head.length is not None and filled < length:
                raise Broken(f"the body was cut, {head.length - filled} bytes are missing")
            return buffer[:filled]
        while not self._over:
            self._feed()
        rest, self._early = self._early, bytearray()
        return memoryview(rest)

    @property
    def reusable(self) -> bool:
        """The answer was read to its end and the other side keeps the connection."""
        return self._over and not self._early and self._keep

    @property
    def stale(self) -> bool:
        """The other side closed it (or sent what nobody asked for) while it was idle."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _send(self, pieces: Pieces) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            for piece in pieces:
                self._socket.sendall(piece)
            return
        views = [piece for piece in pieces if piece.nbytes]
        while views:
            views = after(views, self._socket.sendmsg(views[:MOST_PIECES]))

    def _read_head(self) -> Head:
        self._headers: dict[str, str] = {}
        self._early.clear()
        self._left, self._over, self._keep = None, False, False
        self._complete = False
        self._parser = httptools.HttpResponseParser(self)
        num_bytes = 0
        while not self._complete:
            if num_bytes > _MAX_HEAD_BYTES:
                raise Broken(f"the head of the answer is longer than {_MAX_HEAD_BYTES} bytes")
            num_bytes += self._feed()
        return Head(self._parser.get_status_code(), self._headers, self._length())

    def _length(self) -> int | None:
        length = self._headers.get("content-length")
        if length is None or not length.isdecimal() or "transfer-encoding" in self._headers:
            return None
        if len(length) > _MOST_DIGITS:
            raise Broken(f"content-length={length[:40]} is the length of no body")
        self._left = int(length) - len(self._early)
        self._over = not self._left
        return int(length)

    def _feed(self) -> int:
        data = self._socket.recv(_HEAD_BYTES)
        self.on_bytes(len(data))
        if not data:
            if self._complete and "transfer-encoding" not in self._headers and not self._keep:
                self._over = True  # a body without a length ends with its connection
                return 0
            raise Broken("the connection was closed before the answer was complete")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Broken(f"the answer is not HTTP ({error})") from error
        return len(data)

    # callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._complete = True
        self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._early += body

    def on_message_complete(self) -> None:
        self._over = True


class Pool:
    """Idle connections to one `http(s)://host:port`, at most `most` of them."""

    def __init__(self, base_url: str, most: int) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WireError(
                f"url={base_url!r} must start with http:// or https://; give the URL that the service printed"
            )
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self.prefix = parts.path.rstrip("/")
        self.netloc = parts.netloc.rpartition("@")[2]
        self._most = most
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)  # a client that nobody closed leaves no open socket

    def take(self, timeout_s: float) -> Connection:
        """An idle connection that still stands, or a new one."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return Connection(self._host, self._port, self._tls, timeout_s)
            if not connection.stale:
                return connection
            connection.close()

    def give(self, connection: Connection) -> None:
        """The request is over."""
        if connection.reusable:
            with self._lock:
                if len(self._idle) < self._most:
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        """Drop idle connections."""
        with self._lock:
            _close_all(self._idle)


def _close_all(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()
