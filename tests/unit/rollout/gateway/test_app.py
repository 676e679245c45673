"""The gateway over real HTTP, with the official OpenAI SDK as the agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from astraflow.errors import EngineError
from astraflow.rollout.gateway.app import create_app
from astraflow.wire.app import bind, serve

openai = pytest.importorskip("openai", reason="the official SDK is what agents use: pip install openai")

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
async def url(world: Any) -> AsyncIterator[str]:
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sock = bind("127.0.0.1", 0, "gateway.port")
    server = asyncio.create_task(serve(create_app(world.gateway), sock, ready.set_result, stop, grace_s=1))
    yield f"{await ready}/v1"
    stop.set()
    await server


@pytest.fixture
async def agent(world: Any, url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key=world.key, max_retries=0, timeout=60) as client:
        yield client


async def raw(url: str, path: str, headers: dict[str, str], body: bytes = b"", method: str = "POST") -> tuple[int, str]:
    """One request without an SDK."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "".join(f"{k}: {v}\r\n" for k, v in {"host": host, "connection": "close", **headers}.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return int(text.split()[1]), text.partition("\r\n\r\n")[2]


async def test_a_completion(world: Any, agent: Any) -> None:
    world.engine.say("yes")
    reply = await agent.chat.completions.create(model="actor", messages=[USER], temperature=0.3, user="someone")
    assert reply.choices[0].message.content == "yes" and reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 4
    assert world.gateway.stats()["gateway/sampling_overridden"] == 1
    assert len(world.close()) == 1


async def test_tool_calls_go_round_through_the_sdk_with_ids_reused(world: Any, agent: Any, fakes: Any) -> None:
    tools = [fakes.tool("f", x="integer")]
    world.engine.say(f"so {CALL}", "done")
    reply = await agent.chat.completions.create(model="actor", messages=[USER], tools=tools)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert (reply.choices[0].finish_reason, message.content) == ("tool_calls", "so")
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    history = [USER, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    reply = await agent.chat.completions.create(model="actor", messages=history, tools=tools)
    assert reply.choices[0].message.content == "done"
    first, second = world.close()
    own = [*first.prompt_ids.tolist(), *first.generation.token_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(own)] == own and not second.forked


async def test_a_stream_says_the_same_as_a_completion(world: Any, agent: Any) -> None:
    text = "word " * 50
    world.engine.say(text)
    stream = await agent.chat.completions.create(
        model="actor", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(pieces) == text and len(pieces) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(text) + 1
    assert len(world.close()) == 1


async def test_tool_calls_are_streamed_as_deltas(world: Any, agent: Any, fakes: Any) -> None:
    world.engine.say(CALL + CALL)
    async with agent.chat.completions.stream(
        model="actor", messages=[USER], tools=[fakes.tool("f", x="integer")]
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    calls = final.choices[0].message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        ("call_0_0", "f", '{"x":1}'),
        ("call_0_1", "f", '{"x":1}'),
    ]


async def test_a_stream_ends_with_done_on_the_wire(world: Any, url: str) -> None:
    world.engine.say("yes")
    body = json.dumps({"model": "actor", "messages": [USER], "stream": True}).encode()
    headers = {"authorization": f"Bearer {world.key}"}
    status, text = await raw(url, "/v1/chat/completions", headers, body)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]"
    first = json.loads(events[0])
    assert first["object"] == "chat.completion.chunk" and "usage" not in first
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None,
                                 "logprobs": None}]  # fmt: skip


async def test_errors_reach_the_sdk_as_openai_errors(world: Any, agent: Any, url: str) -> None:
    create = agent.chat.completions.create
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="known: actor"):
            await create(model="gpt-4o", messages=[USER], stream=stream)
        with pytest.raises(openai.BadRequestError, match="n=129 must be from 1 to 128"):
            await create(model="actor", messages=[USER], n=129, stream=stream)
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="actor", messages=[{"role": "user", "content": "x" * 1000}], stream=stream)
        assert caught.value.code == "context_length_exceeded"
        world.engine.script.append(EngineError("engine", "down", "is closed", "restart"))
        with pytest.raises(openai.InternalServerError, match="is closed") as failed:
            await create(model="actor", messages=[USER], stream=stream)
        assert failed.value.status_code == 503
    async with openai.AsyncOpenAI(base_url=url, api_key="af-guess", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="actor", messages=[USER])
    world.close()
    with pytest.raises(openai.APIStatusError) as gone:
        await create(model="actor", messages=[USER])
    assert gone.value.status_code == 410


async def test_models_lists_the_policies(agent: Any) -> None:
    assert [model.id async for model in agent.models.list()] == ["actor"]
    assert (await agent.models.retrieve("actor")).owned_by == "astraflow"
    with pytest.raises(openai.NotFoundError):
        await agent.models.retrieve("other")


async def test_health_needs_no_key_and_everything_else_does(url: str) -> None:
    assert await raw(url, "/health", {}, method="GET") == (200, '{"ok":true}')
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/actor"), ("POST", "/v1/chat/completions")):
        for headers in ({}, {"authorization": "Bearer "}, {"authorization": "Basic x"}, {"authorization": "Bearer x"}):
            status, text = await raw(url, path, headers, b"{}", method)
            assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"


async def test_unknown_paths_methods_and_bodies_get_openai_errors(world: Any, url: str) -> None:
    headers = {"authorization": f"Bearer {world.key}"}
    assert (await raw(url, "/v1/embeddings", headers, b"{}"))[0] == 404
    assert (await raw(url, "/v1/chat/completions", headers, method="GET"))[0] == 405
    status, text = await raw(url, "/v1/chat/completions", headers, b"\x80\x04pickle")
    assert status == 400 and json.loads(text)["error"]["param"] == "body"


async def test_an_agent_that_hangs_up_cancels_its_call(world: Any, url: str) -> None:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "actor", "messages": [USER]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {world.key}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    while not world.engine.held:
        await asyncio.sleep(0.001)
    writer.close()
    await writer.wait_closed()
    while not world.engine.cancelled:
        await asyncio.sleep(0.001)
    assert world.engine.cancelled == list(world.engine.held)
    capture = world.gateway.close_episode(world.key)
    assert (world.gateway.stats()["gateway/cancelled"], capture.calls["actor"]) == (1, [])
