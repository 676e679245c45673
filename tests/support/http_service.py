"""A small service of every kind of route, for tests of client and app over a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import (
    DataflowError,
    JournalError,
    SchemaError,
)
from astraflow.wire.app import (
    MAX_BODY_BYTES,
    HttpError,
    StreamReply,
    bind,
    create_app,
    json_reply,
    read_json,
    read_stream_body,
    serve,
)
from astraflow.wire.client import HttpClient
from astraflow.wire.local import BODY_HEADER, Inbox
from astraflow.wire.messages import Ok

NAMES: list[str | None] = []
"""Of the bodies of /bulk in the inbox; None: they came over the socket."""
PATHS: list[Path | None] = []
"""Where the bodies of /bulk lay; None: in memory."""
FULL = 0
"""How many requests the disk is still full for."""

AWAY = 0
"""How many requests the service still stops for."""


async def full(request: Request) -> Response:
    global FULL
    FULL -= 1
    if FULL >= 0:
        raise JournalError("journal", "x", "cannot be written", "free some disk")
    return json_reply(Ok())


async def away(request: Request) -> Response:
    global AWAY
    AWAY -= 1
    if AWAY >= 0:
        raise HttpError(503, "service=stopping answers nobody; ask again", pause_s=1)
    return json_reply(Ok())


async def echo(request: Request) -> Response:
    return json_reply(await read_json(request, Ok))


async def bulk(request: Request) -> Response:
    with await read_stream_body(request) as body:
        NAMES.append(request.headers.get(BODY_HEADER))
        PATHS.append(body.path)
        return StreamReply([memoryview(bytes(body.view))])


async def fail(request: Request) -> Response:
    raise {
        "state": DataflowError("batch", 7, "is not leased", "pull it first"),
        "disk": JournalError("journal", "x", "cannot be written", "free some disk"),
        "schema": SchemaError("column", "a", "is missing", "send it"),
        "gone": HttpError(410, "run=calculator is over; stop"),
    }[request.path_params["kind"]]


@contextmanager
def running(
    token: str | None = None,
    inbox: Inbox | None = None,
    limit: int = MAX_BODY_BYTES,
    fast: bool = True,
) -> Iterator[str]:
    routes = [
        Route("/echo", echo, methods=["POST"]),
        Route("/bulk", bulk, methods=["POST"]),
        Route("/fail/{kind}", fail),
        Route("/full", full, methods=["POST"]),
        Route("/away", away, methods=["POST"]),
    ]
    url: list[str] = []
    ready = threading.Event()
    loop = uvloop.new_event_loop() if fast else asyncio.new_event_loop()
    stop = asyncio.Event()

    def on_ready(text: str) -> None:
        url.append(text)
        ready.set()

    async def main() -> None:
        app = create_app(routes, token=token, inbox=inbox, max_body_bytes=limit)
        await serve(app, bind("127.0.0.1", 0, "port"), on_ready, stop, bulk=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def bulk_of(client: HttpClient, pieces: list[memoryview]) -> tuple[int, memoryview, Mapping[str, str]]:
    """What POST /bulk gives back for these pieces, sent as the client sends an Arrow stream."""
    replies: list[tuple[int, memoryview, Mapping[str, str]]] = []
    send = client._send

    def kept(*args: Any) -> tuple[int, memoryview, Mapping[str, str]]:
        replies.append(send(*args))
        return 200, memoryview(b'{"ok":true}'), {}

    client._send = kept  # type: ignore[method-assign]
    try:
        client.post_stream("/bulk", pieces, Ok)
    finally:
        client._send = send  # type: ignore[method-assign]
    return replies[-1]
