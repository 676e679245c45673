"""A stream of server-sent events that ends its source when the agent hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from astraflow.rollout.gateway.dialects.http import hung_up

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies pass every event on at once


class EventStream(Response):
    """`frames` is closed at once when the agent hangs up, also in the middle of waiting for the next frame."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.wait({sending})
            await self._frames.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
