"""OpenAI's Responses over HTTP: create (whole, streamed, in the background), get, delete, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.calls.events import Event, Finished, Started
from astraflow.rollout.gateway.calls.retries import retry_of
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialects.http import body_of, key_of, unless_gone
from astraflow.rollout.gateway.dialects.responses.records import ResponseRecord, new_response
from astraflow.rollout.gateway.dialects.responses.reply import Happening, ResponseBuilder, fill, frame
from astraflow.rollout.gateway.dialects.responses.request import (
    ResponsesRequest,
    chat_request,
    messages_of,
    read_request,
)
from astraflow.rollout.gateway.dialects.responses.store import ResponseStore, Stored
from astraflow.rollout.gateway.dialects.sse import EventStream
from astraflow.rollout.gateway.dialects.writing import written


def routes(gateway: Gateway) -> list[Route]:
    """What the SDK's `responses` asks for; errors are those of the app."""
    serve = _Serve(gateway)
    return [
        Route("/v1/responses", serve.create, methods=["POST"]),
        Route("/v1/responses/{id}", serve.get, methods=["GET"]),
        Route("/v1/responses/{id}", serve.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", serve.cancel, methods=["POST"]),
    ]


class _Serve:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        key = key_of(request)
        store = self._gateway.responses(key)
        asked = read_request(await body_of(request))
        _refuse_unserved(asked)
        before = store.previous(asked.previous_response_id)
        messages = messages_of(asked.input, store.item)
        chat = chat_request(asked, [*(before.history() if before is not None else ()), *messages])
        retry = retry_of(request.headers)
        if not (asked.stream or asked.background):
            completion = await unless_gone(request, self._gateway.chat(key, chat, retry))
            stored = Stored(new_response(asked, completion.id, completion.created), before, messages)
            fill(stored.response, completion)
            stored.answer(completion)
            if stored.response.store:
                store.keep(stored)
            return _json(stored.response)
        events = self._gateway.stream(key, chat, retry)
        first = await unless_gone(request, anext(events))
        assert isinstance(first, Started)
        stored = Stored(new_response(asked, first.id, first.created), before, messages)
        writer = _Writer(stored, store)
        frames = written(first, events, writer.write, writer.fail)
        if asked.stream:
            return EventStream(frames)
        store.keep(stored)
        stored.task = asyncio.create_task(_drain(frames))
        return _json(stored.response)

    async def get(self, request: Request) -> Response:
        stored = self._stored(request)
        if request.query_params.get("stream") == "true":
            raise GatewayError("stream", True, "is served while a response is made only", "leave it out")
        return _json(stored.response)

    async def delete(self, request: Request) -> Response:
        response_id = self._stored(request).response.id
        self._gateway.responses(key_of(request)).delete(response_id)
        body = {"id": response_id, "object": "response", "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        stored = self._stored(request)
        if stored.task is None:
            raise GatewayError(
                "response_id", stored.response.id, "was not made in the background", "hang up to cancel it"
            )  # fmt: skip
        stored.task.cancel()
        await asyncio.wait({stored.task})
        if stored.response.status == "in_progress":
            stored.response.status = "cancelled"
        return _json(stored.response)

    def _stored(self, request: Request) -> Stored:
        return self._gateway.responses(key_of(request)).get(request.path_params["id"])


def _refuse_unserved(asked: ResponsesRequest) -> None:
    if asked.background and asked.stream:
        raise GatewayError("background", True, "cannot go with stream", "leave one out")
    if asked.background and asked.store is False:
        raise GatewayError("background", True, "needs store", "leave store out, or ask without background")


class _Writer:
    """The stream of a response, which is stored once it is whole."""

    def __init__(self, stored: Stored, store: ResponseStore) -> None:
        self._stored, self._store = stored, store
        self._builder = ResponseBuilder(stored.response)
        self._count = 0

    def write(self, event: Event) -> Iterator[bytes]:
        """Server-sent events."""
        if isinstance(event, Started):
            yield from self._frames(self._builder.start())
        elif isinstance(event, Finished):
            frames = list(self._frames(self._builder.on(event)))
            self._stored.answer(event.completion)
            if self._stored.response.store:
                self._store.keep(self._stored)  # before the agent can ask for it
            yield from frames
        else:
            yield from self._frames(self._builder.on(event))

    def fail(self, error: AstraFlowError) -> Iterator[bytes]:
        """After the start."""
        yield from self._frames(self._builder.fail(error))

    def _frames(self, happenings: Iterable[Happening]) -> Iterator[bytes]:
        for happening in happenings:
            yield frame(self._count, happening)
            self._count += 1


async def _drain(frames: AsyncIterator[bytes]) -> None:
    """Makes a response that nobody reads the events of."""
    async for _ in frames:
        pass


def _json(response: ResponseRecord) -> Response:
    return Response(msgspec.json.encode(response), media_type="application/json")
