"""The HTTP shell of every service: bearer token, protocol check, one error form, a bind that is loopback by default."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.errors import (
    AstraFlowError,
    DataflowError,
    GatewayError,
    JournalError,
    LaunchError,
    SchemaError,
    WireError,
)
from astraflow.wire.bulk import AnswerProtocol, BulkProtocol, Cut, QuietServer, bulk_of
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.local import BODY_HEADER, HOST_HEADER, INBOX_HEADER, MIN_BYTES, Body, Inbox, host_identity
from astraflow.wire.messages import PROTOCOL, PROTOCOL_HEADER, Failure, Id

T = TypeVar("T")
MAX_BODY_BYTES = 1 << 30
_HOST, _PROTOCOL = HOST_HEADER.encode(), PROTOCOL_HEADER.encode()
_READS = ("GET", "HEAD")  # a browser or Prometheus may ask too; what changes something needs a header of our own, which
# no web page of another origin can send
_JSON = "application/json"


class HttpError(AstraFlowError):
    """Answer with this status and sentence. `pause_s`: how long to wait before the request is sent again; 0: unsaid.
    `reason`: a word to count it by."""

    def __init__(
        self, status: int, message: str, kind: str = "WireError", *, pause_s: int = 0, reason: str = ""
    ) -> None:
        self.status, self.kind, self.pause_s, self.reason = status, kind, pause_s, reason
        super().__init__(message)


def _ignore(error: Exception) -> None:
    """Nobody counts refusals here."""


class _Number(IntegerConvertor):
    """A number in a path. Starlette's own lets digits through that `int` refuses, which is answered as our fault."""

    regex = "[0-9]{1,18}"


register_url_convertor("int", _Number())


def create_app(
    routes: Sequence[BaseRoute],
    *,
    token: str | None,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    inbox: Inbox | None = None,
    on_refused: Callable[[Exception], None] = _ignore,
    bare: bool = False,
) -> Starlette:
    """A Starlette app with the rules of the house around `routes`. /health needs no token and says nothing else.

    Args: max_body_bytes: larger bodies are refused unread. inbox: takes bodies from clients on the same host.
    on_refused: called with each error that a request is answered with. bare: requests need no protocol header; what
    changes something must then insist on JSON (`read_json`), which keeps web pages of other origins out as well.
    """
    app = Starlette(
        routes=[Route("/health", _health), *routes],
        lifespan=lifespan,
        exception_handlers={AstraFlowError: _on_error},
    )
    app.state.limit, app.state.inbox, app.state.on_refused = max_body_bytes, inbox, on_refused
    app.add_middleware(_Gatekeeper, token=token, limit=max_body_bytes, inbox=inbox, on_refused=on_refused, bare=bare)
    return app


class _Gatekeeper:
    """Token, protocol version and size, before anything is read."""

    def __init__(
        self, app: ASGIApp, token: str | None, limit: int, inbox: Inbox | None, on_refused: Callable[[Exception], None],
        bare: bool,
    ) -> None:  # fmt: skip
        self.app, self._limit, self._on_refused, self._bare = app, limit, on_refused, bare
        self._expected = f"Bearer {token}".encode() if token else None
        self._host = host_identity().encode() if inbox is not None else b""
        self._place = (INBOX_HEADER.encode(), inbox.place.encode()) if inbox is not None else (b"", b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (refusal := self._refusal(headers, bare=self._bare or scope["method"] in _READS)) is not None:
            await refusal(scope, receive, send)
        elif self._host and headers.get(_HOST) == self._host:
            await self.app(scope, receive, self._signed(send))
        else:
            await self.app(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes], *, bare: bool) -> Response | None:
        if self._expected and not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            failure = Failure(
                "token=*** is missing or wrong; set ASTRAFLOW_TOKEN to the token of this run", "Unauthorized"
            )
            self._on_refused(HttpError(401, failure.error, failure.kind))
            return json_reply(failure, 401)
        theirs = headers.get(_PROTOCOL, b"none")
        if theirs != str(PROTOCOL).encode() and not (bare and _PROTOCOL not in headers):
            failure = Failure(
                f"{PROTOCOL_HEADER}={theirs.decode('latin-1')} must be {PROTOCOL}; "
                "send that header, or install the same AstraFlow version on both sides",
                "ProtocolMismatch",
            )
            self._on_refused(HttpError(426, failure.error, failure.kind))
            return json_reply(failure, 426)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            error = _too_large(int(length), self._limit)
            self._on_refused(error)
            return _on_error(None, error)
        return None

    def _signed(self, send: Send) -> Send:
        """Say where bodies may be put, to a client on the same host."""

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], self._place]
            await send(message)

        return signed


def _too_large(size: int, limit: int) -> HttpError:
    return HttpError(
        413, f"body={size} bytes must be at most {limit}; send fewer episodes at once, or raise dataflow.max_body_bytes"
    )


async def _health(request: Request) -> Response:
    return json_reply({"ok": True})


def _on_error(request: Request | None, error: Exception) -> Response:
    if request is not None:
        request.app.state.on_refused(error)
    match error:
        case HttpError():
            reply = json_reply(Failure(str(error), error.kind), error.status)
            if error.pause_s:
                reply.headers["retry-after"] = str(error.pause_s)
            return reply
        case GatewayError():
            status = error.status
        case SchemaError():
            status = 422
        case JournalError():
            status = 507
        case DataflowError():
            status = 409
        case WireError() if error.status is not None:
            status = error.status
        case _:
            status = 500
    return json_reply(Failure(str(error), type(error).__name__), status)


def json_reply(body: Any, status: int = 200) -> Response:
    """A struct (or plain JSON-able value) as a JSON response."""
    return Response(msgspec.json.encode(body), status, media_type=_JSON)


class StreamReply(Response):
    """An Arrow stream as a response: its pieces are sent one after the other, without a copy."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        super().__init__(
            headers={"content-length": str(sum(piece.nbytes for piece in pieces))}, media_type=CONTENT_TYPE
        )
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece.cast("B"), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def shares_files(request: Request) -> bool:
    """The client runs on this host and may map files of the run directory."""
    return bool(host_identity()) and request.headers.get(HOST_HEADER) == host_identity()


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as a struct; 415 when it is of another type, 422 with the reason when it is not one."""
    _check_type(request, _JSON, "send JSON")
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # the second: nested too deeply
        raise HttpError(
            422, f"body={bytes(body[:80])!r} must be a {kind.__name__} ({error}); see docs/protocol.md"
        ) from error


def path_id(request: Request, name: str) -> str:
    """The id of this name in the path, bound as those in bodies are; else 422."""
    try:
        return msgspec.convert(request.path_params[name], Id)
    except msgspec.ValidationError as error:
        said = repr(request.path_params[name][:80])
        raise HttpError(422, f"{name}={said} must be an id ({error}); see docs/protocol.md") from error


def _check_type(request: Request, wanted: str, fix: str) -> None:
    kind = request.headers.get("content-type", "none")
    if kind.partition(";")[0].strip().lower() != wanted:
        raise HttpError(415, f"content-type={kind[:80]} must be {wanted}; {fix}, see docs/protocol.md")


async def read_stream_body(request: Request) -> Body:
    """The body of a request that brings an Arrow stream; use it in a `with` block.

    Raises: HttpError: 413 when it is too large, 415 when it is of another type, 400 when it was cut.
    """
    _check_type(request, CONTENT_TYPE, "send an Arrow IPC stream")
    if (body := _from_inbox(request)) is not None:
        return body
    inbox: Inbox | None = request.app.state.inbox
    bulk = bulk_of(request.scope)
    if inbox is None or bulk is None or bulk.length < MIN_BYTES:
        return Body(await _receive(request))
    with _cut(), inbox.draft() as draft:
        await bulk.read(draft.write)
        return draft.body()


def _from_inbox(request: Request) -> Body | None:
    name, inbox, limit = request.headers.get(BODY_HEADER), request.app.state.inbox, request.app.state.limit
    if name is None or inbox is None or not shares_files(request):
        return None
    body: Body = inbox.take(name)
    if len(body.view) > limit:
        with body:
            raise _too_large(len(body.view), limit)
    return body


async def read_body(request: Request) -> memoryview:
    """The whole body in one buffer."""
    if (body := _from_inbox(request)) is None:
        return await _receive(request)
    with body:
        return body.view


async def _receive(request: Request) -> memoryview:
    with _cut():
        if (bulk := bulk_of(request.scope)) is not None:
            return await bulk.read_all()
        return await _collect(request)


async def _collect(request: Request) -> memoryview:
    length, limit = request.headers.get("content-length", ""), request.app.state.limit
    buffer, filled = bytearray(int(length) if length.isdigit() else 0), 0
    async for piece in request.stream():
        if (end := filled + len(piece)) > limit:
            raise _too_large(end, limit)
        buffer[filled:end] = piece
        filled = end
    return memoryview(buffer)


@contextmanager
def _cut() -> Iterator[None]:
    try:
        yield
    except (Cut, ClientDisconnect) as error:
        raise HttpError(400, "body=cut must be complete; send the request again") from error


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, token: str | None, setting: str) -> None:
    """Refuse a non-loopback address without a token.

    Raises: LaunchError naming `setting`.
    """
    if not token and not is_loopback(host):
        raise LaunchError(
            setting,
            host,
            "is not loopback and there is no token",
            "set ASTRAFLOW_TOKEN to a long random string on every host",
        )


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A bound, listening socket; port 0 takes any free port.

    Raises: LaunchError: the port is used or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Inherited by accepted sockets: a header and a body written apart must not wait 40 ms for each other.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # inherited too: a host that is gone says no goodbye
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, UnicodeError, OverflowError) as error:  # UnicodeError: no name of a host; OverflowError: no port
        sock.close()
        foreign = isinstance(error, UnicodeError | socket.gaierror) or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL
        fix = "the host must be an address of this machine" if foreign else "choose another port, or 0 for any free one"
        reason = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(setting, f"{host}:{port}", f"cannot be bound ({reason})", fix) from error
    return sock


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    on_ready: Callable[[str], None],
    stop: asyncio.Event,
    *,
    grace_s: float = 3.0,
    bulk: bool = False,
) -> None:
    """Serve `app` on a socket from `bind` until `stop` is set; `on_ready(url)` is called once it answers.

    Args: bulk: large bodies take the short way of `wire.bulk`, which all endpoints of `app` must know.
    Raises: LaunchError: the app's lifespan failed at start.
    """
    config = uvicorn.Config(
        app, http=BulkProtocol if bulk else AnswerProtocol, log_config=None, access_log=False, proxy_headers=False,
        lifespan="on", timeout_graceful_shutdown=max(1, round(grace_s)), timeout_keep_alive=75, ws="none",
        server_header=False, date_header=False, backlog=1024, limit_max_requests=None,
    )  # fmt: skip
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http server")
    waiter = asyncio.create_task(stop.wait(), name="stop")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise LaunchError("service", "start", "failed before it could answer", "see the log above this line")
            await asyncio.sleep(0.005)
        host, port = sock.getsockname()[:2]
        on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.end()
        waiter.cancel()
        await task
