"""`/v1/completions` over HTTP."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.rollout.gateway.calls.retries import retry_of
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import failure
from astraflow.rollout.gateway.dialects.completions.reply import CompletionStream, completion_of, data_frame
from astraflow.rollout.gateway.dialects.completions.request import raw_request, read_request
from astraflow.rollout.gateway.dialects.http import body_of, key_of, unless_gone
from astraflow.rollout.gateway.dialects.sse import EventStream
from astraflow.rollout.gateway.dialects.writing import written


def routes(gateway: Gateway) -> list[Route]:
    """The one route; errors are those of the app."""

    async def completions(request: Request) -> Response:
        key = key_of(request)
        gateway.check_key(key)
        asked = read_request(await body_of(request))
        raw, retry = raw_request(asked), retry_of(request.headers)
        echo = raw.prompt if asked.echo and isinstance(raw.prompt, str) else ""
        if not asked.stream:
            completion = completion_of(await unless_gone(request, gateway.chat(key, raw, retry)), echo)
            return Response(msgspec.json.encode(completion), media_type="application/json")
        events = gateway.stream(key, raw, retry)
        first = await unless_gone(request, anext(events))
        stream = CompletionStream(echo, include_usage=bool((asked.stream_options or {}).get("include_usage")))
        return EventStream(written(first, events, stream.frames, lambda error: [data_frame(failure(error)[1])]))

    return [Route("/v1/completions", completions, methods=["POST"])]
