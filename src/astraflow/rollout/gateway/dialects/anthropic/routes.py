"""Anthropic's Messages over HTTP: `/v1/messages` and `/v1/messages/count_tokens`.

The key of the episode comes as `x-api-key` or as bearer token; `anthropic-version` may be any. Anthropic's SDKs append
`/v1/messages` to their base URL: they work with the URL of the node and with the one that ends in `/v1`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import AstraFlowError
from astraflow.rollout.gateway.calls.retries import retry_of
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialects.anthropic.reply import MessageStream, error_frame, failure, message_of
from astraflow.rollout.gateway.dialects.anthropic.request import chat_request, read_count_request, read_messages_request
from astraflow.rollout.gateway.dialects.http import body_of, key_of, unless_gone
from astraflow.rollout.gateway.dialects.sse import EventStream
from astraflow.rollout.gateway.dialects.writing import written


class Exchange(msgspec.Struct):
    """What the reply to one request needs beside the answer."""

    request_id: str
    max_context: int = 0  # of the policy; 0: not known yet

    def json(self, status: int, body: bytes) -> Response:
        """A whole reply."""
        return Response(body, status, self.headers(), media_type="application/json")

    def headers(self) -> dict[str, str]:
        """Under which the SDKs look for the id."""
        return {"request-id": self.request_id}

    def failure(self, error: AstraFlowError) -> tuple[int, bytes]:
        """Status and error object."""
        return failure(error, self.request_id, self.max_context)


Answer = Callable[[Request, Exchange], Awaitable[Response]]


def routes(gateway: Gateway) -> list[Route]:
    """What Anthropic's clients ask for, but for the list of models."""

    async def messages(request: Request, exchange: Exchange) -> Response:
        key = key_of(request)
        gateway.check_key(key)
        asked = read_messages_request(await body_of(request))
        exchange.max_context = gateway.max_context(asked.model)
        chat, retry = chat_request(asked), retry_of(request.headers)
        if not asked.stream:
            completion = await unless_gone(request, gateway.chat(key, chat, retry))
            return exchange.json(200, msgspec.json.encode(message_of(completion, exchange.max_context)))
        events = gateway.stream(key, chat, retry)
        first = await unless_gone(request, anext(events))
        stream = MessageStream(exchange.max_context)
        frames = written(first, events, stream.frames, lambda error: [error_frame(exchange.failure(error)[1])])
        return EventStream(frames, exchange.headers())

    async def count_tokens(request: Request, exchange: Exchange) -> Response:
        key = key_of(request)
        gateway.check_key(key)
        asked = read_count_request(await body_of(request))
        count = gateway.prompt_tokens(key, chat_request(asked))
        return exchange.json(200, msgspec.json.encode({"input_tokens": count}))

    def served(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        """`answer`, with errors in Anthropic's shape."""

        async def serve(request: Request) -> Response:
            exchange = Exchange(f"req_{secrets.token_hex(12)}")
            try:
                return await answer(request, exchange)
            except AstraFlowError as error:
                return exchange.json(*exchange.failure(error))

        return serve

    return [
        Route(f"{base}{path}", served(answer), methods=["POST"])
        for base in ("/v1/messages", "/v1/v1/messages")
        for path, answer in (("", messages), ("/count_tokens", count_tokens))
    ]
