"""Chat Completions over real HTTP while the engine samples, with the official SDK."""

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


async def until(holds: Any) -> None:
    """Returns once it does."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


@pytest.fixture
async def made(stage: Any) -> AsyncIterator[Any]:
    made = stage("abcdef", "second", "third")
    stop = asyncio.Event()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    sock = bind("127.0.0.1", 0, "gateway.port")
    server = asyncio.create_task(serve(create_app(made.gateway), sock, ready.set_result, stop, grace_s=1))
    made.url = f"{await ready}/v1"
    async with openai.AsyncOpenAI(base_url=made.url, api_key=made.key, max_retries=0, timeout=60) as made.agent:
        yield made
    stop.set()
    await server


async def test_deltas_arrive_while_the_engine_samples(made: Any) -> None:
    create = made.agent.chat.completions.create
    usage = {"include_usage": True}
    stream = await create(model="actor", messages=[USER], stream=True, n=2, stream_options=usage)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        if all(len(text) == made.engine.stats()["sampled_tokens"] / 2 for text in texts):
            made.engine.step()
        assert not chunk.choices or chunk.usage is None
    assert texts == ["abcdef", "second"] and chunk.usage.completion_tokens == 14


async def test_an_agent_that_stops_reading_a_stream_stops_the_engine(made: Any) -> None:
    stream = await made.agent.chat.completions.create(model="actor", messages=[USER], stream=True)
    made.engine.step(2)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "ab":
            break
    assert made.engine.stats()["running"] == 1
    await stream.close()
    await until(lambda: made.engine.stats()["running"] == 0)
    (call,) = made.close()
    assert made.chat.decode(call.generation.token_ids) == "ab"


async def test_an_engine_that_fails_in_the_middle_is_raised_by_the_sdk(made: Any) -> None:
    stream = await made.agent.chat.completions.create(model="actor", messages=[USER], stream=True)
    made.engine.step()
    with pytest.raises(openai.APIError, match="is gone") as caught:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                made.engine.fail(EngineError("engine", "broken", "is gone", "start it again"))
    assert caught.value.code == "engine_unavailable" and made.close() == []


async def test_an_episode_that_is_over_ends_its_streams_by_an_error(made: Any) -> None:
    stream = await made.agent.chat.completions.create(model="actor", messages=[USER], stream=True)
    made.engine.step()
    with pytest.raises(openai.APIError, match="belongs to an episode that is over"):
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                (call,) = made.close()
    assert made.chat.decode(call.generation.token_ids) == "a"


async def test_a_request_that_is_sent_twice_under_one_key_is_one_call(made: Any) -> None:
    create = made.agent.chat.completions.create
    made.engine.release()
    headers = {"Idempotency-Key": "k"}
    first, again = [await create(model="actor", messages=[USER], extra_headers=headers) for _ in range(2)]
    assert first == again and first.id == again.id
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="actor", messages=[USER, USER], extra_headers=headers)
    assert caught.value.code == "idempotency_key_reused"
    assert len(made.close()) == 1


async def test_the_sdk_itself_retries_and_the_lost_call_is_trained_once(made: Any) -> None:
    """The connection of the first try breaks after the engine has it; the SDK asks again by itself."""
    heads: list[bytes] = []

    async def flaky(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        host, port = made.url.removeprefix("http://").removesuffix("/v1").split(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        length = int(heads[-1].lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        up_writer.write(heads[-1] + await reader.readexactly(length))
        if len(heads) == 1:
            await until(lambda: made.engine.stats()["running"])
            writer.transport.abort()  # towards the agent only: the gateway does not notice yet
            kept.append(up_writer)
            return
        made.engine.release()
        writer.write(await up_reader.readuntil(b"}]"))
        writer.write(await up_reader.read(65536))
        for each in (up_writer, writer):
            each.close()

    kept: list[asyncio.StreamWriter] = []
    proxy = await asyncio.start_server(flaky, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=made.key, max_retries=1) as agent:
        reply = await agent.chat.completions.create(model="actor", messages=[USER])
    assert reply.choices[0].message.content == "abcdef"
    assert [b"x-stainless-retry-count: 1" in head.lower() for head in heads] == [False, True]
    assert len(made.close()) == 1 and made.stat("retries") == 1
    kept[0].close()
    proxy.close()


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
async def test_what_is_not_served_is_named_in_openais_error(made: Any, wish: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await made.agent.chat.completions.create(model="actor", messages=[USER], **wish)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert made.engine.stats()["requests"] == 0


async def test_developers_content_parts_and_penalties_are_served(made: Any) -> None:
    made.engine.release()
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    reply = await made.agent.chat.completions.create(
        model="actor", messages=messages, presence_penalty=0.5, logprobs=True, max_completion_tokens=3, n=1
    )
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("abc", "length")
    assert [row.token for row in reply.choices[0].logprobs.content] == ["a", "b", "c"]
    assert made.stat("sampling_overridden") == 1
    text = made.chat.decode(made.engine.seen[0][1], skip_special_tokens=False)
    assert text == "<s><|system|>be</s>\n<|user|>hi</s>\n<|assistant|>"
    assert json.loads(json.dumps(reply.model_dump()))["usage"]["completion_tokens"] == 3
