"""The gateway over real HTTP, and the official SDKs as agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from astraflow.rollout.gateway.app import create_app
from astraflow.rollout.gateway.core import Gateway
from astraflow.wire.app import bind, serve


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    """The URL of a gateway, as agents get it: it ends in /v1."""
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sock = bind("127.0.0.1", 0, "gateway.port")
    server = asyncio.create_task(serve(create_app(gateway), sock, ready.set_result, stop, grace_s=1))
    yield f"{await ready}/v1"
    stop.set()
    await server


@pytest.fixture(scope="session")
def served() -> Callable[[Gateway], AbstractAsyncContextManager[str]]:
    """Serves any gateway."""
    return serving


@pytest.fixture
async def url(world: Any) -> AsyncIterator[str]:
    """Of the gateway of `world`."""
    async with serving(world.gateway) as where:
        yield where


@pytest.fixture
async def agent(world: Any, url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key=world.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def claude(world: Any, url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=world.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def post(world: Any, url: str) -> Callable[..., Awaitable[Any]]:
    """One request without an SDK: status, headers and body."""

    async def send(path: str, body: Any = b"", method: str = "POST", **headers: str) -> SimpleNamespace:
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": host, "connection": "close", "authorization": f"Bearer {world.key}", **headers}
        head = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in fields.items())
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        top, _, rest = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        lines = [line.partition(": ") for line in top.split("\r\n")[1:]]
        return SimpleNamespace(
            status=int(top.split()[1]), headers={name.lower(): value for name, _, value in lines}, body=rest
        )

    return send


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Waits until something is true; the test's own timeout is the deadline."""

    async def wait(true: Callable[[], Any]) -> None:
        while not true():
            await asyncio.sleep(0.001)

    return wait


CALL = '<tool_call>{"name": "f", "arguments": {"x": %d}}</tool_call>'


def spelled(text: str) -> list[str]:
    """`text` as tokens: tool call marks whole, everything else letter by letter (hello is a token of its own)."""
    tokens: list[str] = []
    while text:
        mark = next((m for m in ("<tool_call>", "</tool_call>") if text.startswith(m)), text[0])
        tokens.append(mark)
        text = text[len(mark) :]
    return tokens


@pytest.fixture(scope="session")
def say() -> SimpleNamespace:
    """How engines speak: `spelled` tokens, and a tool call."""
    return SimpleNamespace(spelled=spelled, call=lambda x: CALL % x)


@pytest.fixture
def unbroken(world: Any) -> Callable[[int], None]:
    """Checks that each call of the episode begins with the ids of the call before, as given and sampled."""

    def check(count: int) -> None:
        calls = world.close()
        assert len(calls) == count and not any(call.forked for call in calls)
        for before, after in pairwise(calls):
            whole = [*before.prompt_ids.tolist(), *before.generation.token_ids.tolist()]
            assert after.prompt_ids.tolist()[: len(whole)] == whole

    return check
