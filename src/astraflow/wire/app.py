"""The HTTP shell of every service: bearer token, protocol check, one error form, a bind that is loopback by default."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
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
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.local import BODY_HEADER, HOST_HEADER, MIN_BYTES, SharedBodies, host_identity, take
from astraflow.wire.messages import PROTOCOL, PROTOCOL_HEADER, Failure

T = TypeVar("T")
_PIECE = 4 << 20


class HttpError(AstraFlowError):
    """Answer with this status and sentence."""

    def __init__(self, status: int, message: str, kind: str = "WireError") -> None:
        self.status, self.kind = status, kind
        super().__init__(message)


def create_app(
    routes: Sequence[BaseRoute],
    *,
    token: str | None,
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """A Starlette app with the rules of the house around `routes`. /health needs no token and says nothing else."""
    app = Starlette(
        routes=[Route("/health", _health), *routes],
        lifespan=lifespan,
        exception_handlers={AstraFlowError: _on_error},
    )
    app.add_middleware(_Gatekeeper, token=token)
    return app


class _Gatekeeper:
    """Token and protocol version, before anything is read."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            headers = dict(scope["headers"])
            if self.expected and not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
                failure = Failure(
                    "token=*** is missing or wrong; set ASTRAFLOW_TOKEN to the token of this run", "Unauthorized"
                )
                await json_reply(failure, 401)(scope, receive, send)
                return
            theirs = headers.get(PROTOCOL_HEADER.encode())
            if theirs is not None and theirs != str(PROTOCOL).encode():
                failure = Failure(
                    f"protocol={theirs.decode('latin-1')} must be {PROTOCOL}; "
                    "install the same AstraFlow version on both sides",
                    "ProtocolMismatch",
                )
                await json_reply(failure, 426)(scope, receive, send)
                return
        await self.app(scope, receive, self._signed(send) if scope["type"] == "http" else send)

    def _signed(self, send: Send) -> Send:
        """Every answer says which host it comes from, so that a client on the same one may share memory."""
        if not (identity := host_identity().encode()):
            return send

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (HOST_HEADER.encode(), identity)]
            await send(message)

        return signed


async def _health(request: Request) -> Response:
    return json_reply({"ok": True})


def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case HttpError():
            return json_reply(Failure(str(error), error.kind), error.status)
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
    return Response(msgspec.json.encode(body), status, media_type="application/json")


_shared = SharedBodies()


def stream_reply(request: Request, body: pa.Buffer | bytes | memoryview) -> Response:
    """An Arrow stream as a response: through shared memory on one host, else in large pieces without a copy."""
    view = memoryview(body)
    if len(view) >= MIN_BYTES and _same_host(request) and (name := _shared.put(view)) is not None:
        return Response(b"", 200, {BODY_HEADER: name}, media_type=CONTENT_TYPE)
    headers = {"content-length": str(len(view))}
    if len(view) <= _PIECE:
        return Response(bytes(view), 200, headers, media_type=CONTENT_TYPE)

    async def pieces() -> AsyncIterator[memoryview]:
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]

    return StreamingResponse(pieces(), 200, headers, media_type=CONTENT_TYPE)


def _same_host(request: Request) -> bool:
    return bool(host_identity()) and request.headers.get(HOST_HEADER) == host_identity()


async def read_json(request: Request, kind: type[T]) -> T:
    """The body as a struct; 422 with the reason when it is not one."""
    body = await read_body(request)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise HttpError(
            422, f"body={bytes(body[:80])!r} must be a {kind.__name__} ({error}); see docs/protocol.md"
        ) from error


async def read_body(request: Request) -> bytes | memoryview:
    """The whole body in one buffer (a mapped one when it came through shared memory)."""
    if (name := request.headers.get(BODY_HEADER)) is not None and _same_host(request):
        return take(name)
    try:
        return await request.body()
    except ClientDisconnect as error:
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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise LaunchError(
            setting,
            f"{host}:{port}",
            f"cannot be bound ({error.strerror})",
            "choose another port, or 0 for any free one",
        ) from error
    return sock


async def serve(
    app: ASGIApp,
    sock: socket.socket,
    on_ready: Callable[[str], None],
    stop: asyncio.Event,
    *,
    grace_s: float = 3.0,
) -> None:
    """Serve `app` on a socket from `bind` until `stop` is set; `on_ready(url)` is called once it answers.

    Raises: LaunchError: the app's lifespan failed at start.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=max(1, round(grace_s)),
        timeout_keep_alive=75, ws="none", server_header=False, date_header=False, backlog=1024, limit_max_requests=None,
    )  # fmt: skip
    server = _Server(config)
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
        server.should_exit = True
        waiter.cancel()
        await task


class _Server(uvicorn.Server):
    """Signals belong to the process that hosts the server, not to the server."""

    def install_signal_handlers(self) -> None: ...

    def capture_signals(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()
