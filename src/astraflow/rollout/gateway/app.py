"""The gateway over HTTP, for agents with a client of their own: every dialect's routes, `/v1/models`, `/health`.

The key of an episode is the bearer token, or `x-api-key`. Errors are OpenAI's or Anthropic's error objects. An agent
that hangs up cancels its call.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialects import chat, models
from astraflow.rollout.gateway.dialects.anthropic import routes as anthropic
from astraflow.rollout.gateway.dialects.completions import routes as completions
from astraflow.rollout.gateway.dialects.errors import error_reply
from astraflow.rollout.gateway.dialects.responses import routes as responses
from astraflow.rollout.loop import Guarded
from astraflow.wire.app import serve

_DIALECTS = (chat, completions, responses, anthropic, models)


def create_app(gateway: Gateway) -> Starlette:
    """The routes of one gateway."""
    routes = [route for dialect in _DIALECTS for route in dialect.routes(gateway)]
    return Starlette(
        routes=[*routes, Route("/health", _health)],
        exception_handlers={AstraFlowError: _on_error, HTTPException: _on_http_error, Exception: _on_fault},
    )


async def _health(request: Request) -> Response:
    return Response(b'{"ok":true}', media_type="application/json")


def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AstraFlowError)
    return error_reply(request, error)


def _on_fault(request: Request, error: Exception) -> Response:
    """A fault of ours has the form of the dialect too; its traceback is in the log, where the server puts it."""
    return error_reply(request, AstraFlowError(f"gateway={type(error).__name__} inside; see the log of the node"))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    fix = "see docs/gateway.md for the paths of each dialect"
    return error_reply(request, GatewayError("path", path, str(error.detail), fix, error.status_code))


async def serve_within(tasks: Guarded, closing: AsyncExitStack, name: str, app: ASGIApp, sock: socket.socket) -> str:
    """Serves `app` on a bound socket as one of `tasks`, until `closing` ends it; gives its URL."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    closing.callback(sock.close)
    server = tasks.spawn(name, serve(app, sock, url.set_result, stop))

    async def end() -> None:
        stop.set()
        await asyncio.wait({server})

    closing.push_async_callback(end)
    return await url
