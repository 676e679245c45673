"""A stream of events ends its source when the agent hangs up, wherever the stream is then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from astraflow.rollout.gateway.dialects.sse import EventStream


@pytest.mark.parametrize("stuck_in", ["send", "source"])
async def test_the_source_is_closed_when_the_agent_hangs_up(stuck_in: str) -> None:
    closed: list[bool] = []
    reached = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            reached.set()
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def send(message: dict[str, Any]) -> None:
        if stuck_in == "send" and message["type"] == "http.response.body":
            reached.set()
            await asyncio.Event().wait()  # the agent does not read

    async def receive() -> dict[str, Any]:
        await reached.wait()
        return {"type": "http.disconnect"}

    source = frames()  # held, so that it is not closed by the garbage collector
    await asyncio.wait_for(EventStream(source)({"type": "http"}, receive, send), 60)  # type: ignore[arg-type]
    assert closed == [True]


async def test_a_whole_stream_is_sent_and_an_error_of_its_source_is_raised() -> None:
    sent: list[dict[str, Any]] = []

    async def frames(*, fail: bool) -> AsyncGenerator[bytes, None]:
        yield b"a"
        if fail:
            raise ValueError("broken")
        yield b"b"

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    await EventStream(frames(fail=False), {"x-request-id": "r"})({"type": "http"}, receive, send)  # type: ignore[arg-type]
    headers = dict(sent[0]["headers"])
    assert (headers[b"x-request-id"], headers[b"content-type"]) == (b"r", b"text/event-stream; charset=utf-8")
    assert b"content-length" not in headers
    assert [(m["body"], m["more_body"]) for m in sent[1:]] == [(b"a", True), (b"b", True), (b"", False)]
    with pytest.raises(ValueError, match="broken"):
        await EventStream(frames(fail=True))({"type": "http"}, receive, send)  # type: ignore[arg-type]
