"""Chat completions at a door: one request each over kept connections, asked again when the network cut it.

A request carries a key of its own, so that the gateway knows it again and samples once (docs/gateway.md). Cancelling
hangs up, which stops the generation.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import uuid
from urllib.parse import urlsplit

import httptools
import msgspec

from astraflow.errors import WireError
from astraflow.rollout.worker.channel import Answer, Ask, Channel
from astraflow.swarm import Play
from astraflow.types import EpisodeLease
from astraflow.wire.swarm.messages import PlayLease

_PATH = "/v1/chat/completions"
_PIECE = 1 << 16
_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MARGIN_S = 1.0  # at most a tenth of an episode's time
_QUIET_S = 30  # of a connection, until the kernel asks whether it still stands: a router may have forgotten it


class Forwarded:
    """What a pool sees of an episode whose calls go to a door (`rollout.players.Player` without its ends)."""

    def __init__(self, calls: Calls, lease: PlayLease | Play) -> None:
        """Of the time of the lease, something is kept for handing the episode in."""
        self.key, self._calls = lease.api_key, calls
        self.lease = EpisodeLease(
            episode_id=lease.episode_id, group_id=lease.episode_id.rpartition("/")[0], attempt=lease.attempt,
            task=lease.task, purpose=lease.purpose, timeout_s=lease.timeout_s, min_versions={}, sampling={},
        )  # fmt: skip
        self.timeout_s = lease.timeout_s - min(_MARGIN_S, 0.1 * lease.timeout_s)
        self.until = asyncio.get_running_loop().time() + self.timeout_s
        self._running: dict[int, asyncio.Task[None]] = {}

    def asked(self, ask: Ask, channel: Channel) -> None:
        self._running[ask.call] = asyncio.get_running_loop().create_task(self._serve(ask, channel))

    def dropped(self, call: int) -> None:
        if (task := self._running.get(call)) is not None:
            task.cancel()

    def hang_up(self) -> None:
        """The episode is over."""
        for task in list(self._running.values()):
            task.cancel()

    async def _serve(self, ask: Ask, channel: Channel) -> None:
        try:
            status, body = await self._calls.ask(self.key, ask.body, self.until)
        finally:
            del self._running[ask.call]
        channel.send(Answer(ask.call, status, body))


class _Reply:
    """Callbacks of httptools."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.over = False
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.over = True


class Calls:
    """Of all episodes of one worker. On one event loop."""

    def __init__(self, url: str) -> None:
        """`url`: of the door. Raises: WireError: it is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WireError(f"url={url!r} must start with http:// or https://; give the URL that the node printed")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._start = f"POST {parts.path.rstrip('/')}{_PATH} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, key: str, body: bytes, until: float) -> tuple[int, bytes]:
        """Status and body of the answer; 503 when there was none before `until` (time of the loop)."""
        head = (
            f"{self._start}authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {uuid.uuid4().hex}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        request, pause = head.encode("latin-1") + body, _FIRST_PAUSE_S
        while True:
            try:
                return await self._once(request)
            except (OSError, httptools.HttpParserError) as error:
                if asyncio.get_running_loop().time() + pause > until:
                    reason = f"the door gave no answer ({error or type(error).__name__})"
                    failure = {"error": {"message": reason, "type": "server_error", "code": "unreachable"}}
                    return 503, msgspec.json.encode(failure)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Drop idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _once(self, request: bytes) -> tuple[int, bytes]:
        reader, writer = await self._connection()
        try:
            writer.write(request)
            reply = _Reply()
            while not reply.over:
                data = await reader.read(_PIECE)
                if not data:
                    raise ConnectionResetError("the connection was closed before the answer was complete")
                reply.parser.feed_data(data)
        except BaseException:
            writer.close()
            raise
        if reply.parser.should_keep_alive():
            self._idle.append((reader, writer))
        else:
            writer.close()
        return reply.parser.get_status_code(), bytes(reply.body)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET_S)
        return reader, writer
