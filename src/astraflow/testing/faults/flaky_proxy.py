"""A bad network on loopback: an HTTP/1.1 proxy that delays, repeats, reorders and cuts requests, by seed.

| fault     | what happens to a request                                                             |
|-----------|---------------------------------------------------------------------------------------|
| delay     | it waits                                                                              |
| reorder   | it waits until another one has passed                                                 |
| duplicate | it is sent twice, one after the other; the second answer counts                       |
| late copy | it is answered, and sent again later, when nobody listens any more                    |
| cut       | the connection breaks before it is sent, after it was answered, or within the answer  |

`with FlakyProxy(url, seed) as proxy: client = DataflowClient(proxy.url)`. After `max_faults` all is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from astraflow.wire.bulk import accept_no_more, turns

FAULTS = ("delay", "reorder", "duplicate", "late copy", "cut before", "cut after", "cut within")
_LIMIT_S = 10.0
_HIDDEN = b"x-astraflow-host"  # bodies travel through the proxy, not beside it


class FlakyProxy:
    """Stands before `url`. `rate`: share of the requests that meet a fault. `counts`: faults so far."""

    def __init__(
        self, url: str, seed: int, *, rate: float = 0.15, longest_s: float = 0.1, max_faults: int = 500
    ) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._chance, self._rate, self._longest_s, self._max = random.Random(seed), rate, longest_s, max_faults
        self.counts: Counter[str] = Counter()
        self.num_requests = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), name="proxy", daemon=True)
        self._thread.start()
        started.wait(_LIMIT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_LIMIT_S)

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._stop, self._passed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        await accept_no_more(server.sockets)
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await turns()  # connections that were aborted close

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begin(self._serve(reader, writer)).add_done_callback(lambda _: writer.transport.abort())

    def _begin(self, action: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _message(reader)) is not None:
                reply, whole = await self._pass(request)
                writer.write(reply)
                await writer.drain()
                if not whole:
                    return
        except (OSError, asyncio.IncompleteReadError, ValueError):
            return  # one of the two sides is gone: the other one sees that, too
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pass(self, request: bytes) -> tuple[bytes, bool]:
        """What is left of the answer, and whether that is all of it."""
        self.num_requests += 1
        fault = self._draw()
        if fault == "cut before":
            return b"", False
        if fault == "delay":
            await asyncio.sleep(self._chance.uniform(0.0, self._longest_s))
        if fault == "reorder":
            self._passed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._passed.wait(), 2 * self._longest_s)
        reply = await self._forward(request)
        if fault == "duplicate":
            reply = await self._forward(request)
        self._passed.set()
        if fault == "late copy":
            self._begin(self._late(request))
        if fault == "cut after":
            return b"", False
        if fault == "cut within":
            return reply[: self._chance.randrange(1, len(reply))], False
        return reply, True

    def _draw(self) -> str:
        if self.counts.total() >= self._max or self._chance.random() >= self._rate:
            return ""
        fault = self._chance.choice(FAULTS)
        self.counts[fault] += 1
        return fault

    async def _late(self, request: bytes) -> None:
        await asyncio.sleep(self._chance.uniform(0.0, 5 * self._longest_s))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._forward(request)

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._target)
        try:
            writer.write(request)
            await writer.drain()
            reply = await _message(reader)
            if reply is None:
                raise ConnectionResetError("no answer")
            return reply
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes | None:
    """One whole request or reply; None: the other side has ended."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise
    lines = [x for x in head[:-4].split(b"\r\n") if not x.lower().startswith(_HIDDEN)]
    sizes = [int(x.partition(b":")[2]) for x in lines if x.lower().startswith(b"content-length:")]
    body = await reader.readexactly(sizes[0]) if sizes else b""
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
