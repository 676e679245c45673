"""A link between two regions on one host: TCP connections with bandwidth, delay, cuts and stalls. Needs no privileges.

```
 client ──► forward(url) ──► [connection's line] ─► [line, all connections] ─► [delay] ─► window ──► service at url
        ◄──                 the same the other way, with a line of its own                      ◄──
```
`with Shaper(Conditions(100e6, 0.075)) as link: client = DataflowClient(link.forward(service_url))`.

Bytes under way are delayed, not held up one behind the other: a second request does not wait for the answer to the
first. A connection takes a round trip to be made, as TCP does. Not modelled: loss, slow start, headers of packets.
Whatever else goes wrong with requests (repeated, reordered, cut within a body) is `faults.flaky_proxy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from astraflow.errors import LaunchError
from astraflow.testing.network.pacing import Bucket, Conditions, piece_bytes
from astraflow.wire.bulk import accept_no_more, turns

T = TypeVar("T")
Direction = Literal["up", "down"]
_LIMIT_S = 10.0
_KERNEL_BYTES = 1 << 17  # of a socket's buffers: bytes that wait must wait at their sender, not in between


@dataclass
class Traffic:
    """What passed so far, in bytes of TCP payload. `up`: from clients to services."""

    up: int = 0
    down: int = 0
    connections: int = 0
    refused: int = 0

    def add(self, direction: Direction, num_bytes: int) -> None:
        """So many passed."""
        if direction == "up":
            self.up += num_bytes
        else:
            self.down += num_bytes

    def minus(self, before: Traffic) -> Traffic:
        """What passed since `before`."""
        return Traffic(
            self.up - before.up, self.down - before.down, self.connections - before.connections,
            self.refused - before.refused,
        )  # fmt: skip


@dataclass
class _Door:
    """Where clients of one service connect."""

    host: str
    port: int
    connection_bits_per_s: float
    traffic: Traffic = field(default_factory=Traffic)
    flips: list[int] = field(default_factory=list)  # bytes down before one that arrives wrong

    def spoil(self, piece: bytes) -> bytes:
        """A piece on its way down, before it is counted."""
        for place in [p for p in self.flips if p < self.traffic.down + len(piece)]:
            self.flips.remove(place)
            at = place - self.traffic.down
            piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
        return piece


class Shaper:
    """One link. All methods may be called from any thread while its block runs."""

    def __init__(self, conditions: Conditions = Conditions()) -> None:  # noqa: B008  # it is frozen
        self._conditions = conditions
        self._lines: dict[Direction, Bucket] = {
            "up": Bucket(conditions.bits_per_s),
            "down": Bucket(conditions.bits_per_s),
        }
        self._doors: dict[str, _Door] = {}  # by URL of the door
        self._open: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._refuses_until = 0.0

    def forward(self, url: str, *, connection_bits_per_s: float = 0.0, port: int = 0) -> str:
        """The URL (scheme and path as in `url`, host 127.0.0.1) by which the service at `url` is reached over the link.

        Args: connection_bits_per_s: further limit of each connection and direction; 0: none. port: 0: any free one.
        Raises: LaunchError: no http:// URL with a port, or a used port.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise LaunchError("link.url", url, "must be http://host:port of a service", "give the URL that it printed")
        door = _Door(parts.hostname, parts.port, connection_bits_per_s)
        opened = self._run(lambda: self._listen(door, port))
        base = f"http://127.0.0.1:{opened}"
        self._doors[base] = door
        return base + parts.path

    @property
    def conditions(self) -> Conditions:
        """As they are now."""
        return self._conditions

    def change(self, conditions: Conditions) -> None:
        """From now on; bytes under way arrive as they were sent."""

        async def set_them() -> None:
            self._conditions = conditions
            for line in self._lines.values():
                line.bits_per_s = conditions.bits_per_s

        self._run(set_them)

    def cut(self) -> None:
        """All connections break at once, and what is under way is lost."""

        async def cancel() -> None:
            for task in self._open:
                task.cancel()

        self._run(cancel)

    def refuse(self, seconds: float) -> None:
        """New connections are reset at once for so long."""

        async def note() -> None:
            self._refuses_until = self._loop.time() + seconds

        self._run(note)

    def flip(self, url: str, after_bytes: int) -> None:
        """A bit of one byte that comes down at `url`, the one after so many more, arrives as its opposite."""
        door = self._doors[f"http://{urlsplit(url).netloc}"]

        async def note() -> None:
            door.flips.append(door.traffic.down + after_bytes)

        self._run(note)

    def stall(self) -> None:
        """Connections stand and new ones are taken, but no byte passes until `go_on`."""
        self._loop.call_soon_threadsafe(self._passing.clear)

    def go_on(self) -> None:
        """The end of a stall."""
        self._loop.call_soon_threadsafe(self._passing.set)

    def traffic(self, url: str = "") -> Traffic:
        """What passed so far: by the URL that `forward` gave, else over the whole link."""
        parts = urlsplit(url)
        doors = [self._doors[f"http://{parts.netloc}"]] if url else list(self._doors.values())
        seen = [door.traffic for door in doors]
        return Traffic(
            sum(t.up for t in seen), sum(t.down for t in seen), sum(t.connections for t in seen),
            sum(t.refused for t in seen),
        )  # fmt: skip

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), name="shaper", daemon=True)
        self._thread.start()
        if not started.wait(_LIMIT_S):
            raise LaunchError("link", "thread", f"did not start in {_LIMIT_S:g} s", "see the machine's load")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_LIMIT_S)

    async def _main(self, started: threading.Event) -> None:
        self._loop, self._stop, self._passing = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._passing.set()
        started.set()
        await self._stop.wait()
        await accept_no_more(listening for server in self._servers for listening in server.sockets)
        for server in self._servers:
            server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await turns()  # connections that were aborted close

    def _run(self, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(action(), self._loop).result(_LIMIT_S)

    async def _listen(self, door: _Door, port: int) -> int:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._serve(door, reader, writer), name="connection")
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            task.add_done_callback(lambda _: writer.transport.abort())  # also of one that was cancelled before it began

        listening = _socket()
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            listening.close()
            raise LaunchError(
                "link.port", port, f"cannot be bound ({error.strerror})", "give another, or 0 for any"
            ) from error
        self._servers.append(await asyncio.start_server(connected, sock=listening))
        opened: int = listening.getsockname()[1]
        return opened

    async def _serve(self, door: _Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._loop.time() < self._refuses_until:
            door.traffic.refused += 1
            writer.transport.abort()
            return
        door.traffic.connections += 1
        ends = [writer]
        try:
            await asyncio.sleep(2 * self._conditions.delay_s)
            await self._passing.wait()
            answers, far = await _connect(door)
            ends.append(far)
            async with asyncio.TaskGroup() as both:
                both.create_task(_Way(self, door, "up").carry(reader, far))
                both.create_task(_Way(self, door, "down").carry(answers, writer))
            for end in ends:
                end.close()
                await end.wait_closed()
        except* OSError:
            pass  # one of the two sides is gone: the other one sees that, too
        except* asyncio.CancelledError:
            pass  # cut
        finally:
            for end in ends:
                end.transport.abort()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
    return made


async def _connect(door: _Door) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    made = _socket()
    try:
        await asyncio.get_running_loop().sock_connect(made, (door.host, door.port))
        return await asyncio.open_connection(sock=made)
    except BaseException:
        made.close()
        raise


class _Way:
    """One direction of one connection."""

    def __init__(self, link: Shaper, door: _Door, direction: Direction) -> None:
        self._link, self._door, self._traffic, self._direction = link, door, door.traffic, direction
        self._own, self._line = Bucket(door.connection_bits_per_s), link._lines[direction]
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._held = 0  # bytes in it
        self._taken = asyncio.Event()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the sender ends and the receiver has it all."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send(reader))
            both.create_task(self._deliver(writer))

    async def _send(self, reader: asyncio.StreamReader) -> None:
        clock = self._link._loop.time
        while True:
            most = piece_bytes(self._own.bits_per_s, self._line.bits_per_s)
            piece = await reader.read(most)
            for line in (self._own, self._line):
                await asyncio.sleep(max(0.0, line.reserve(len(piece), clock()) - clock()))
            await self._link._passing.wait()
            while piece and self._held >= self._link.conditions.window_bytes:
                self._taken.clear()
                await self._taken.wait()
            if self._direction == "down" and self._door.flips:
                piece = self._door.spoil(piece)
            self._traffic.add(self._direction, len(piece))
            self._held += len(piece)
            self._under_way.put_nowait((clock() + self._link.conditions.delay_s, piece))
            if not piece:
                return

    async def _deliver(self, writer: asyncio.StreamWriter) -> None:
        clock = self._link._loop.time
        while True:
            due, piece = await self._under_way.get()
            if (left := due - clock()) > 0:
                await asyncio.sleep(left)
            await self._link._passing.wait()
            if not piece:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()
            self._held -= len(piece)
            self._taken.set()
