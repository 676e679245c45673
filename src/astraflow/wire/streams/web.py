"""Requests of an engine to a server, on an event loop: JSON there, JSON or a stream of events back."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from astraflow.errors import EngineError

_PIECE = 1 << 16
MAX_BODY_BYTES = 1 << 26  # of an answer that is no stream
_MAX_LINE = 1 << 24  # of one event
_CONNECT_S = 10.0
_SHOWN = 500  # characters of an answer that an error repeats


class Lost(EngineError):
    """No answer, or not all of it: the server may be gone."""


class Refused(EngineError):
    """The server answered that it will not. `status`: of HTTP; `retry_after`: its header, "": none."""

    def __init__(
        self, thing: str, value: object, rule: str, fix: str, status: int = 500, retry_after: str = ""
    ) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(thing, value, rule, fix)


class Web:
    """One server. Each request has a connection of its own: closing it is how a generation is cancelled."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url`: http(s)://host:port, perhaps with a path. `key`: bearer token of the server, not of a run."""
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self.url = url.rstrip("/")
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\nconnection: close\r\naccept-encoding: identity\r\n"
        if key:
            self._head += f"authorization: Bearer {key}\r\n"

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within_s: float
    ) -> bytes:  # fmt: skip
        """The body of the answer. Raises: Lost: none came within `within_s`. Refused: its status is no success."""
        try:
            async with asyncio.timeout(within_s), self._open(method, path, body) as answer:
                return await self._whole(answer, path)
        except TimeoutError:
            raise Lost(
                "server", f"{self.url}{path}", f"gave no answer within {within_s:g} s", "see its log"
            ) from None  # fmt: skip

    async def _whole(self, answer: AsyncIterator[bytes], path: str) -> bytes:
        pieces, size = [], 0
        async for piece in answer:
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise Lost(
                    "server", f"{self.url}{path}", f"sent an answer of more than {MAX_BODY_BYTES} bytes", "see its log"
                )
        return b"".join(pieces)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event, "[DONE]" not among them. Raises: as `ask`, without a limit of time; Lost
        too when the stream ends before "[DONE]"."""
        rest = b""
        async with self._open("POST", path, body) as answer:
            async for piece in answer:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise Lost("server", f"{self.url}{path}", f"sent a line of more than {_MAX_LINE} bytes", "see it")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield data
        raise Lost("server", f"{self.url}{path}", "cut its answer", "see its log")

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:  # fmt: skip
        content = b"" if body is None else msgspec.json.encode(body)
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}content-type: application/json\r\n"
        writer = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()
            answer = _Answer(reader, f"{self.url}{path}")
            await answer.begin()
            if not 200 <= answer.status < 300:
                text = (await self._whole(answer.pieces(), path)).decode(errors="replace").strip()
                raise Refused(
                    "server", f"{self.url}{path}", f"answered {answer.status}: {text[:_SHOWN]}",
                    "see its log", answer.status, answer.retry_after,
                )  # fmt: skip
            yield answer.pieces()
        except (OSError, httptools.HttpParserError) as error:  # a deadline of the connection is an OSError too
            raise Lost(
                "server", f"{self.url}{path}", f"is lost ({type(error).__name__}: {error})", "see its log"
            ) from error
        finally:
            if writer is not None:
                writer.close()


class _Answer:
    """One answer while it is read: httptools calls the `on_...` methods."""

    def __init__(self, reader: asyncio.StreamReader, where: str) -> None:
        self._reader, self._where = reader, where
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._begun = self._whole = False
        self.status, self.retry_after = 0, ""

    async def begin(self) -> None:
        """Until the status and all headers are there."""
        while not self._begun:
            await self._read()
        self.status = self._parser.get_status_code()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while True:
            if self._pieces:
                pieces, self._pieces = self._pieces, []
                yield b"".join(pieces)
            if self._whole:
                return
            await self._read()

    async def _read(self) -> None:
        received = await self._reader.read(_PIECE)
        if not received:
            raise Lost("server", self._where, "closed the connection before its answer was whole", "see its log")
        self._parser.feed_data(received)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._whole = True
