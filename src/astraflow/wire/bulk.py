"""Large request bodies pass by the HTTP parser: the socket is read into one buffer, which goes on to a file.

```
 head ─► uvicorn's parser ─► app asks for the body ─► Bulk: recv_into(4 MB) ─► write ─► ... ─► next head
```

Until the app asks, nothing is read; a body that it never asks for is read and dropped after the answer. Measured for
25 MB on loopback: 12 ms until the body is in a file, 21 ms through the parser. Only an app whose endpoints all read
with `app.read_body` and `app.read_stream_body` may be served with it: `receive` gives nothing of such a body.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import httptools
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from astraflow.wire.connection import fresh

BULK, CLIENT = "astraflow.bulk", "astraflow.client"  # extensions of an ASGI scope
MIN_BYTES = 64 << 10  # of a body that passes by the parser
_BUFFER_BYTES = 4 << 20  # written at once: small pieces take several times as long (measured on ext4)
_SMALL_BYTES = 64 << 10  # of a body that is joined to its head
SILENT_S = 60.0  # a client that owes the rest of a request may be silent for so long
_SO_NWRITE = 0x1024  # of macOS
_TURNS = 8  # of the loop, until what was accepted in one of them has its protocol
Write = Callable[[memoryview], object]


class Cut(Exception):
    """The client went away before its body was complete."""


class Bulk:
    """The body of one request, `length` bytes."""

    def __init__(self, length: int, resume: Callable[[], None]) -> None:
        self.length = length
        self._left, self._resume = length, resume
        self._buffer, self._filled = fresh(min(length, _BUFFER_BYTES)), 0
        self._write: Write | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read_all(self) -> memoryview:
        """The body in one buffer.

        Raises: Cut.
        """
        if self.length <= len(self._buffer):
            await self.read(lambda piece: None)
            return self._buffer[: self.length]
        whole, filled = fresh(self.length), 0

        def add(piece: memoryview) -> None:
            nonlocal filled
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)

        await self.read(add)
        return whole

    async def read(self, write: Write) -> None:
        """Give the body to `write`, piece by piece; a piece is valid during the call only.

        Raises: Cut. What `write` raises.
        """
        self._write = write
        self._resume()
        await self._over

    @property
    def complete(self) -> bool:
        """All bytes have come."""
        return not self._left

    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._buffer[self._filled : self._filled + self._left]

    def came(self, count: int) -> None:
        """So many bytes were put into `room`."""
        self._filled += count
        self._left -= count
        if self._left and self._filled < len(self._buffer):
            return
        piece, self._filled = self._buffer[: self._filled], 0
        if self._write is not None and not self._over.done():
            try:
                self._write(piece)
            except Exception as error:  # the app's, and raised there; the rest of the body is dropped
                self._over.set_exception(error)
        if not self._left and not self._over.done():
            self._over.set_result(None)

    def cut(self) -> None:
        """No more bytes will come."""
        if not self._over.done():
            self._over.set_exception(Cut())
            self._over.exception()  # nobody may wait for it


def bulk_of(scope: Scope) -> Bulk | None:
    """The large body of a request; None: it is small, or comes through `receive`."""
    bulk: Bulk | None = scope.get("extensions", {}).get(BULK, {}).get("body")
    return bulk


class Client(Protocol):
    """Who takes an answer."""

    def unsent(self) -> int:
        """Bytes of answers that it has not taken yet: they fall while a slow client reads, even where one write of the
        app takes minutes."""

    def cut(self) -> None:
        """Break the connection; what is unsent is lost."""


class _Unknown:
    """Of a server that does not say."""

    def unsent(self) -> int:
        return 0

    def cut(self) -> None: ...


def client_of(scope: Scope) -> Client:
    """The other end of the connection of a request."""
    client: Client = scope.get("extensions", {}).get(CLIENT, {}).get("client", _Unknown())
    return client


def _in_kernel(sock: Any) -> int:
    """Bytes in the send queue of a socket, sent ones included that are not acknowledged; 0 once it is closed."""
    try:
        if sys.platform == "darwin":
            return int(sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE))
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):
        return 0


class OneWrite:
    """A transport that sends the head of an answer together with the first piece of its body.

    uvicorn writes them apart: two system calls here and two wake-ups of the client. Measured for a small request: 56 us
    of the service instead of 70, and 31 us of the client instead of 41.
    """

    def __init__(self, transport: Any) -> None:
        self._transport, self._head = transport, b""
        self.get_extra_info, self.is_closing = transport.get_extra_info, transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading
        self.set_protocol = transport.set_protocol

    def unsent(self) -> int:
        """See `Client`."""
        if self.is_closing():
            return 0
        waits: int = self._transport.get_write_buffer_size()
        return waits + _in_kernel(self.get_extra_info("socket"))

    def cut(self) -> None:
        """See `Client`."""
        self.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()  # without lingering the kernel would keep what it has for a client that takes nothing

    def write(self, data: bytes | memoryview) -> None:
        """Send, or keep a head until more comes: every answer has a body, if only an empty one."""
        if not self._head and data[:5] == b"HTTP/":
            self._head = bytes(data)
            return
        head, self._head = self._head, b""
        if len(data) <= _SMALL_BYTES:
            data = head + data
        elif head:
            self._transport.write(head)
        self._transport.write(data)

    def close(self) -> None:
        """Send what was kept, and close."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""
        self._transport.close()


async def accept_no_more(sockets: Iterable[socket.socket]) -> None:
    """To be awaited before a server that listens on `sockets` is closed. Until a connection has its protocol, some
    turns after it was accepted, asyncio loses it with its server: nobody closes it. (uvloop does not.)"""
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):
        for listening in sockets:
            loop.remove_reader(listening.fileno())
        await turns()


async def turns() -> None:
    """Until what the loop was told to do soon is done: connections that were accepted begin, aborted ones close."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class QuietServer(uvicorn.Server):
    """Signals belong to the process that hosts the server, not to the server. It hardly wakes up, where uvicorn's own
    does ten times a second. It closes connections whose client owes the rest of a request and says no more, and leaves
    none open when it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._over = asyncio.Event()

    def end(self) -> None:
        """Answer what has begun, then end."""
        self.should_exit = True
        self._over.set()

    async def main_loop(self) -> None:
        while not self.should_exit:
            with suppress(TimeoutError):
                async with asyncio.timeout(SILENT_S / 4):
                    await self._over.wait()
            self._cut_silent(asyncio.get_running_loop().time() - SILENT_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await accept_no_more(sockets or ())
        await super().shutdown(sockets)
        for connection in tuple(self.server_state.connections):  # of a client that did not take its answer in time
            connection.transport.cut()  # type: ignore[attr-defined]
        await turns()  # the loop closes them now, and may be gone after this

    def _cut_silent(self, since: float) -> None:
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, AnswerProtocol) and connection.owes and connection.heard < since:
                connection.transport.close()

    def install_signal_handlers(self) -> None: ...

    def capture_signals(self) -> Any:
        return nullcontext()


class AnswerProtocol(HttpToolsProtocol):
    """uvicorn's protocol with answers in one piece."""

    heard = 0.0  # when the last bytes came, on the clock of the loop

    def connection_made(self, transport: Any) -> None:
        self._answers, self.heard = OneWrite(transport), self.loop.time()
        super().connection_made(self._answers)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self.scope.setdefault("extensions", {})[CLIENT] = {"client": self._answers}
        super().on_headers_complete()

    @property
    def owes(self) -> bool:
        """The client must send something: the rest of a request, or all of its first one."""
        if self.cycle is None or self.cycle.response_complete:
            return self.timeout_keep_alive_task is None  # else uvicorn closes what is idle between two requests
        return self.cycle.more_body and not self.flow.read_paused


class BulkProtocol(AnswerProtocol):
    """Steps aside for large bodies."""

    _bulk: Bulk | None = None

    def on_headers_complete(self) -> None:
        self._bulk = None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) >= MIN_BYTES and not self.parser.should_upgrade():
            self._bulk = Bulk(int(length), self.flow.resume_reading)
            self.scope.setdefault("extensions", {})[BULK] = {"body": self._bulk}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._bulk is None:
            super().on_body(body)
            return
        start = 0
        while start < len(body):
            room = self._bulk.room()
            count = min(len(room), len(body) - start)
            room[:count] = body[start : start + count]
            self._bulk.came(count)
            start += count

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._bulk is not None and not self._bulk.complete and not self.transport.is_closing():
            if not self.cycle.response_complete:
                self.flow.pause_reading()
            self.transport.set_protocol(_Reader(self, self.transport, self._bulk))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._bulk is not None:
            self._bulk.cut()
        super().connection_lost(exc)

    def body_over(self) -> None:
        """The last byte came past the parser, which is still waiting for it."""
        self._bulk = None
        self.parser = httptools.HttpRequestParser(self)
        self.cycle.more_body = False
        self.cycle.message_event.set()


class _Reader(asyncio.BufferedProtocol):
    """Takes the place of `http` while the body comes."""

    def __init__(self, http: BulkProtocol, transport: Any, bulk: Bulk) -> None:
        self._http, self._transport, self._bulk = http, transport, bulk

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._bulk.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._http.heard = self._http.loop.time()
        self._bulk.came(nbytes)
        if self._bulk.complete:
            self._transport.set_protocol(self._http)
            self._http.body_over()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
