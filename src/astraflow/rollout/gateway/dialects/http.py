"""What every dialect does with an HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from astraflow.errors import GatewayError

T = TypeVar("T")
MAX_BODY_BYTES = 64 << 20  # far more text than any context holds


def key_of(request: Request) -> str:
    """The key of the episode: a bearer token (OpenAI), or `x-api-key` (Anthropic).

    Raises: GatewayError (401): there is none.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = request.headers.get("x-api-key", "")
    if not key.strip():
        raise GatewayError(
            "authorization", "missing", "must be 'Bearer <key of the episode>'", "set api_key", 401, "invalid_api_key"
        )
    return key.strip()


async def body_of(request: Request) -> bytes:
    """Raises: GatewayError: it is too large (413), or the agent hung up in the middle of it (499)."""
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise GatewayError("body", f"{size} bytes", f"must be at most {MAX_BODY_BYTES}", "send less", 413)
            pieces.append(piece)
        return b"".join(pieces)
    except ClientDisconnect as error:
        raise GatewayError("body", "cut", "must be complete", "send the request again", 499) from error


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the agent hangs up before it is there.

    Raises: GatewayError (499): so it did.
    """
    doing = asyncio.current_task()
    assert doing is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        await hung_up(request.receive)
        gone = True
        doing.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or doing.uncancel():  # the server ends, too
            raise
        error = GatewayError("connection", "closed", "was closed by the agent", "keep it open for the reply", 499)
        raise error from None
    finally:
        watching.cancel()


async def hung_up(receive: Receive) -> None:
    """Returns when the agent has."""
    while (await receive())["type"] != "http.disconnect":
        pass
