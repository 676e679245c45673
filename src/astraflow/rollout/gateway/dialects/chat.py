"""OpenAI's Chat Completions over HTTP: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import AstraFlowError
from astraflow.rollout.gateway.calls.events import ChoiceEnded, Event, Finished, Reasoning, Started, Text, ToolDelta
from astraflow.rollout.gateway.calls.retries import retry_of
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import (
    SSE_DONE,
    ChatChunk,
    ChunkChoice,
    Delta,
    Logprobs,
    TokenLogprob,
    ToolCallDelta,
    failure,
    read_request,
    sse,
)
from astraflow.rollout.gateway.dialects.http import body_of, key_of, unless_gone
from astraflow.rollout.gateway.dialects.sse import EventStream
from astraflow.rollout.gateway.dialects.writing import written


def routes(gateway: Gateway) -> list[Route]:
    """The one route; errors are those of the app."""

    async def completions(request: Request) -> Response:
        key = key_of(request)
        gateway.check_key(key)
        asked, retry = read_request(await body_of(request)), retry_of(request.headers)
        if not asked.stream:
            completion = await unless_gone(request, gateway.chat(key, asked, retry))
            headers = {"x-request-id": completion.id}
            return Response(msgspec.json.encode(completion), 200, headers, media_type="application/json")
        events = gateway.stream(key, asked, retry)
        first = await unless_gone(request, anext(events))
        stream = ChunkStream(include_usage=bool((asked.stream_options or {}).get("include_usage")))
        headers = {"x-request-id": first.id} if isinstance(first, Started) else {}
        return EventStream(written(first, events, stream.frames, error_frames), headers)

    return [Route("/v1/chat/completions", completions, methods=["POST"])]


def error_frames(error: AstraFlowError) -> Iterator[bytes]:
    """How a stream that has begun says that it failed: OpenAI's SDKs raise it."""
    yield b"data: " + failure(error)[1] + b"\n\n"


class ChunkStream:
    """Writes the events of one request as chunks."""

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._started = Started("", 0, "", 0, 0)

    def frames(self, event: Event) -> Iterator[bytes]:
        """Server-sent events."""
        if isinstance(event, Started):
            self._started = event
            for choice in range(event.num_choices):
                yield self._frame(choice, Delta(role="assistant", content=""))
        elif isinstance(event, Text):
            yield self._frame(event.choice, Delta(content=event.text), event.logprobs)
        elif isinstance(event, Reasoning):
            yield self._frame(event.choice, Delta(reasoning_content=event.text), event.logprobs)
        elif isinstance(event, ToolDelta):
            yield from self._tool_frames(event)
        elif isinstance(event, ChoiceEnded):
            yield self._frame(event.choice, Delta(), event.logprobs, event.finish_reason)
        else:
            yield from self._last_frames(event)

    def _tool_frames(self, event: ToolDelta) -> Iterator[bytes]:
        logprobs = event.logprobs
        if event.id:
            opening = ToolCallDelta(
                index=event.index, id=event.id, type="function", function={"name": event.name, "arguments": ""}
            )
            yield self._frame(event.choice, Delta(tool_calls=[opening]), logprobs)
            logprobs = []
        if event.arguments:
            piece = ToolCallDelta(index=event.index, function={"arguments": event.arguments})
            yield self._frame(event.choice, Delta(tool_calls=[piece]), logprobs)

    def _last_frames(self, event: Finished) -> Iterator[bytes]:
        if self._include_usage:
            chunk = self._chunk([])
            chunk.usage = event.completion.usage
            yield sse(chunk)
        yield SSE_DONE

    def _frame(
        self, choice: int, delta: Delta, logprobs: list[TokenLogprob] | None = None, finish_reason: str | None = None
    ) -> bytes:
        rows = Logprobs(logprobs) if logprobs else None
        return sse(self._chunk([ChunkChoice(index=choice, delta=delta, finish_reason=finish_reason, logprobs=rows)]))

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        started = self._started
        return ChatChunk(
            id=started.id, created=started.created, model=started.model, choices=choices,
            usage=None if self._include_usage else UNSET,
        )  # fmt: skip
