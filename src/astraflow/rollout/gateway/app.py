"""The gateway over HTTP, for agents with a client of their own: `/v1/chat/completions`, `/v1/models`, `/health`.

The key of an episode is the bearer token. Errors are OpenAI's error objects. An agent that hangs up cancels its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import SSE_DONE, ChatCompletion, ChatRequest, chunks, failure, read_request, sse


def create_app(gateway: Gateway) -> Starlette:
    """The routes of one gateway."""

    async def completions(request: Request) -> Response:
        key = _key(request)
        gateway.check_key(key)
        try:
            body = await request.body()
        except ClientDisconnect as error:
            raise GatewayError("body", "cut", "must be complete", "send the request again", 499) from error
        asked = read_request(body)
        completion = await _unless_gone(request, gateway, key, asked)
        if not asked.stream:
            return _json(200, msgspec.json.encode(completion))
        return StreamingResponse(_events(asked, completion), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        gateway.check_key(_key(request))
        rows = [_model(name) for name in gateway.policies]
        return _json(200, msgspec.json.encode({"object": "list", "data": rows}))

    async def model(request: Request) -> Response:
        gateway.check_key(_key(request))
        name = request.path_params["name"]
        if name not in gateway.policies:
            known = ", ".join(gateway.policies)
            raise GatewayError("model", name, "is not a policy of this node", f"known: {known}", 404, "model_not_found")
        return _json(200, msgspec.json.encode(_model(name)))

    async def health(request: Request) -> Response:
        return _json(200, b'{"ok":true}')

    routes = [
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
    ]
    return Starlette(routes=routes, exception_handlers={AstraFlowError: _on_error, HTTPException: _on_http_error})


async def _unless_gone(request: Request, gateway: Gateway, key: str, asked: ChatRequest) -> ChatCompletion:
    """The completion; cancelled when the agent hangs up before it is there."""
    call = asyncio.ensure_future(gateway.chat(key, asked))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise GatewayError("connection", "closed", "was closed by the agent", "keep it open for the reply", 499)
        return call.result()
    finally:
        gone.cancel()
        call.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(asked: ChatRequest, completion: ChatCompletion) -> AsyncIterator[bytes]:
    include_usage = bool((asked.stream_options or {}).get("include_usage"))
    for chunk in chunks(completion, include_usage=include_usage):
        yield sse(chunk)
    yield SSE_DONE


def _model(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "astraflow"}


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise GatewayError(
            "authorization", "missing", "must be 'Bearer <key of the episode>'", "set api_key", 401, "invalid_api_key"
        )
    return key.strip()


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")


def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AstraFlowError)
    return _json(*failure(error))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = GatewayError(
        "path", f"{request.method} {request.url.path}", str(error.detail), "use /v1/chat/completions or /v1/models",
        error.status_code,
    )  # fmt: skip
    return _json(*failure(problem))
