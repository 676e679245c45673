"""Writes down every request that a service gets, and disturbs some of them as real life does.

| fault  | what the one who asked sees                      | what the service saw |
|--------|--------------------------------------------------|----------------------|
| lost   | the connection breaks instead of an answer       | the request          |
| twice  | the answer to a repeated request                 | the request, twice   |
| full   | 507: the journal cannot be written               | nothing              |
| late   | nothing, until `release`                         | the request          |
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pyarrow as pa
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.wire.app import json_reply
from astraflow.wire.codec import CONTENT_TYPE, HEADER_KEY
from astraflow.wire.describe.operations import OPERATIONS
from astraflow.wire.local import HOST_HEADER
from astraflow.wire.messages import Failure

Kind = Literal["lost", "twice", "full", "late"]


@dataclass(eq=False)
class Exchange:
    """One request and its answer."""

    at: float  # monotonic, when the request was whole
    name: str  # of the operation, see `wire.describe.operations`; "": there is none
    params: dict[str, str]  # of its path
    body: dict[str, Any]  # JSON, or the header of an Arrow stream; {}: none, or neither
    rows: pa.Table | None = None  # of an Arrow stream
    status: int = 0  # 0: not answered yet
    answered: float = 0.0
    reply: dict[str, Any] = field(default_factory=dict)
    reply_rows: pa.Table | None = None
    fault: Kind | None = None
    noted: dict[str, Any] = field(default_factory=dict)  # what `Tap.look` saw before the service did anything

    @property
    def done(self) -> bool:
        """The one who asked knows the answer, and it is not a refusal."""
        return 200 <= self.status < 300 and self.fault != "lost"


def in_order(exchanges: Sequence[Exchange]) -> list[tuple[Exchange, bool]]:
    """Requests (False) and answers (True) as they happened; what was never answered has no answer."""
    moments = [(x.at, False, i) for i, x in enumerate(exchanges)]
    moments += [(x.answered, True, i) for i, x in enumerate(exchanges) if x.status]
    return [(exchanges[i], answer) for _, answer, i in sorted(moments)]


@dataclass
class _Fault:
    kind: Kind
    when: Callable[[Exchange], bool]
    times: int


class Tap:
    """Kept over restarts of the service. Thread-safe for readers. `look` is called, in a thread, with each request."""

    def __init__(self, look: Callable[[Exchange], None] = lambda exchange: None) -> None:
        self.exchanges: list[Exchange] = []
        self.look, self._released = look, threading.Event()
        self._faults: list[_Fault] = []
        self._lock = threading.Lock()

    def disturb(self, kind: Kind, when: Callable[[Exchange], bool], times: int = 1) -> None:
        """The next `times` requests for which `when` holds meet this fault."""
        with self._lock:
            self._faults.append(_Fault(kind, when, times))

    def release(self) -> None:
        """Answers that are late are given now."""
        self._released.set()

    async def wait_for_release(self) -> None:
        """Until `release`, 30 s at most."""
        await asyncio.to_thread(self._released.wait, 30.0)

    def wrap(self, app: Any) -> None:
        """Watch a Starlette app."""
        app.add_middleware(_Watch, tap=self)

    def draw(self, exchange: Exchange) -> Kind | None:
        """The fault that this request meets."""
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.when(exchange):
                    fault.times -= 1
                    return fault.kind
        return None


class _Watch:
    def __init__(self, app: ASGIApp, tap: Tap) -> None:
        self._app, self._tap = app, tap

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Bodies come through the socket, so that they can be read here.
        scope = {**scope, "headers": [h for h in scope["headers"] if h[0] != HOST_HEADER.encode()]}
        body = await _whole(receive)
        kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        header, rows = _read(kind, body)
        name, params = _operation(scope["method"], scope["path"])
        exchange = Exchange(time.monotonic(), name, params, header, rows)
        exchange.fault = self._tap.draw(exchange)
        self._tap.exchanges.append(exchange)
        await asyncio.to_thread(self._tap.look, exchange)
        answer = _Answer()
        match exchange.fault:
            case "full":
                failure = Failure("journal=full cannot be written; this is a test of who asks", "JournalError")
                await json_reply(failure, 507)(scope, receive, answer)
            case "twice":
                await self._app(scope, _again(body, receive), _Answer())
                await self._app(scope, _again(body, receive), answer)
            case _:
                await self._app(scope, _again(body, receive), answer)
        exchange.reply, exchange.reply_rows = _read(answer.kind, answer.body)
        exchange.answered = time.monotonic()
        exchange.status = answer.status
        if exchange.fault == "late":
            await self._tap.wait_for_release()
        if exchange.fault == "lost":  # the server closes a connection whose answer is not as long as it said
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
            return
        for message in answer.messages:
            await send(message)


class _Answer:
    """Collects what an app sends."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.status, self.kind, self.body = 0, "", b""

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.kind = dict(message.get("headers", ())).get(b"content-type", b"").decode("latin-1")
        else:
            self.body += message.get("body", b"")


def _patterns() -> list[tuple[str, str, re.Pattern[str]]]:
    found = []
    for operation in OPERATIONS:
        path = re.sub(r"\{(\w+):path\}", r"(?P<\1>.+)", operation.path)
        path = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        found.append((operation.method, operation.name, re.compile(path)))
    return found


_PATTERNS = _patterns()


def _operation(method: str, path: str) -> tuple[str, dict[str, str]]:
    for its, name, pattern in _PATTERNS:
        if its == method and (match := pattern.fullmatch(path)):
            return name, match.groupdict()
    return "", {}


async def _whole(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _read(kind: str, body: bytes) -> tuple[dict[str, Any], pa.Table | None]:
    try:
        if kind.startswith(CONTENT_TYPE):
            with pa.ipc.open_stream(body) as reader:
                table = reader.read_all()
            return msgspec.json.decode((table.schema.metadata or {})[HEADER_KEY], type=dict[str, Any]), table
        return (msgspec.json.decode(body, type=dict[str, Any]) if body else {}), None
    except (pa.ArrowInvalid, msgspec.DecodeError, KeyError, OSError):
        return {}, None  # the service says what is wrong with it
