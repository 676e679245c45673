"""Anthropic's own SDK against the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from astraflow.errors import EngineError

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
]


async def test_a_message(world: Any, claude: Any) -> None:
    world.engine.say("yes")
    reply = await claude.messages.create(model="actor", max_tokens=9, messages=[USER], system="be short")
    assert (reply.type, reply.role, reply.model, reply.id[:4]) == ("message", "assistant", "actor", "msg_")
    assert [(block.type, block.text) for block in reply.content] == [("text", "yes")]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert (reply.usage.output_tokens, reply.usage.input_tokens) == (4, len(world.engine.requests[0][1]))
    assert reply._request_id.startswith("req_")
    assert world.prompt_text() == "<s><|system|>be short</s>\n<|user|>hi</s>\n<|assistant|>"
    assert world.engine.requests[0][2].max_tokens == 9


async def test_both_base_urls_and_both_kinds_of_key(world: Any, url: str) -> None:
    for base in (url, url.removesuffix("/v1")):
        for key in ({"api_key": world.key}, {"auth_token": world.key, "api_key": None}):
            world.engine.say("yes")
            async with anthropic.AsyncAnthropic(base_url=base, max_retries=0, **key) as client:
                assert (await client.messages.create(model="actor", max_tokens=9, messages=[USER])).content
    assert len(world.close()) == 4


@pytest.mark.parametrize("streamed", [False, True])
async def test_three_turns_with_tools_reuse_every_id(
    world: Any, claude: Any, say: Any, unbroken: Any, streamed: bool
) -> None:
    async def ask(messages: list[Any]) -> Any:
        asked = {"model": "actor", "max_tokens": 500, "messages": messages, "tools": TOOLS, "system": "s"}
        if not streamed:
            return await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    for text in ("hello " + say.call(1) + say.call(2), say.call(3), "hello"):
        world.engine.say_pieces(*say.spelled(text))
    messages: list[Any] = [USER]
    first = await ask(messages)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert (first.stop_reason, [b.input for b in first.content[1:]]) == ("tool_use", [{"x": 1}, {"x": 2}])
    results = [
        {"type": "tool_result", "tool_use_id": first.content[1].id, "content": [{"type": "text", "text": "one"}]},
        {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "two", "is_error": True},
    ]
    messages += [first.to_param(), {"role": "user", "content": results}]
    second = await ask(messages)
    assert [block.type for block in second.content] == ["tool_use"]
    result = {"type": "tool_result", "tool_use_id": second.content[0].id, "content": "three"}
    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": [result]}]
    third = await ask(messages)
    assert (third.content[0].text, third.stop_reason) == ("hello", "end_turn")
    messages += [third.to_param(), {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    world.engine.say("bye")
    await ask(messages)
    assert "<|tool|>one</s>\n<|tool|>Error: two</s>\n" in world.prompt_text(1)
    unbroken(4)


async def test_the_events_of_a_stream_in_their_order(world: Any, claude: Any, say: Any) -> None:
    world.engine.say("so " + say.call(1))
    stream = await claude.messages.create(model="actor", max_tokens=99, messages=[USER], tools=TOOLS, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    starts = [at for at, kind in enumerate(kinds) if kind == "content_block_start"]
    stops = [at for at, kind in enumerate(kinds) if kind == "content_block_stop"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert (
        len(starts) == len(stops) == 2 and starts[0] == 1 and starts[1] == stops[0] + 1 and stops[1] == len(kinds) - 3
    )
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    assert events[0].message.usage.input_tokens == len(world.engine.requests[0][1])
    assert "".join(e.delta.text for e in events[2 : stops[0]]).strip() == "so"
    opened = events[starts[1]].content_block
    assert (opened.type, opened.id, opened.name, opened.input) == ("tool_use", "call_0_0", "f", {})
    assert json.loads("".join(e.delta.partial_json for e in events[starts[1] + 1 : stops[1]])) == {"x": 1}
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == len(world.chat.encode("so " + say.call(1))) + 1


async def test_a_stream_on_the_wire_has_a_ping_and_names_its_events(world: Any, post: Any) -> None:
    world.engine.say("yes")
    body = {"model": "actor", "max_tokens": 9, "messages": [USER], "stream": True}
    reply = await post("/v1/messages", body)
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    lines = reply.body.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:3] == ["message_start", "ping", "content_block_start"] and names[-1] == "message_stop"
    told = [json.loads(line.removeprefix("data: "))["type"] for line in lines if line.startswith("data: ")]
    assert told == names


@pytest.mark.parametrize(
    ("say", "limit", "stop", "reason", "met", "text"),
    [
        ("hello", 2, [], "max_tokens", None, "hello"),
        ("one STOP two", 99, ["END", "STOP"], "stop_sequence", "STOP", "one "),
        ("hello", 99, ["END"], "end_turn", None, "hello"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_why_a_reply_ended(
    world: Any, claude: Any, say: str, limit: int, stop: list[str], reason: str, met: str, text: str, streamed: bool
) -> None:
    world.engine.cut(say) if reason == "max_tokens" else world.engine.say(say)
    asked = {"model": "actor", "max_tokens": limit, "messages": [USER], "stop_sequences": stop}
    if streamed:
        async with claude.messages.stream(**asked) as stream:
            reply = await stream.get_final_message()
    else:
        reply = await claude.messages.create(**asked)
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == (reason, met, text)


async def test_a_reply_that_fills_the_context_says_so(world: Any, claude: Any) -> None:
    room = 1000 - len(world.chat.encode(world.chat.render([USER], None, add_generation_prompt=True)))
    world.engine.cut("x" * room)
    reply = await claude.messages.create(model="actor", max_tokens=2000, messages=[USER])
    assert reply.stop_reason == "model_context_window_exceeded"


async def test_errors_reach_the_sdk_as_its_exceptions(world: Any, claude: Any, url: str) -> None:
    async def ask(client: Any = claude, **changes: Any) -> None:
        await client.messages.create(**{"model": "actor", "max_tokens": 9, "messages": [USER]} | changes)

    for stream in (False, True):
        with pytest.raises(anthropic.NotFoundError, match="model=claude is not a policy") as unknown:
            await ask(model="claude", stream=stream)
        assert unknown.value.body["error"]["type"] == "not_found_error"
        assert unknown.value.body["request_id"] == unknown.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="no prefill") as bad:
            await ask(messages=[USER, {"role": "assistant", "content": "So"}], stream=stream)
        assert bad.value.body["type"] == "error" and bad.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match=r"JSON [Ss]chema"):
            await ask(tools=[{"name": "f", "input_schema": {"type": 5}}], stream=stream)
        with pytest.raises(anthropic.BadRequestError, match=r"tool_choice=.* must be 'auto' or 'none'"):
            await ask(tools=TOOLS, tool_choice={"type": "any"}, stream=stream)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1000 maximum"):
            await ask(messages=[{"role": "user", "content": "x" * 1000}], stream=stream)
        world.engine.script.append(EngineError("engine", "down", "is closed", "restart"))
        with pytest.raises(anthropic.APIStatusError, match="is closed") as failed:
            await ask(stream=stream)
        assert (failed.value.status_code, failed.value.body["error"]["type"]) == (503, "api_error")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="af-guess", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                await ask(stranger, stream=stream)
            assert wrong.value.body["error"]["type"] == "authentication_error"
    world.close()
    with pytest.raises(anthropic.APIStatusError) as gone:
        await ask()
    assert gone.value.status_code == 410


async def test_a_retry_of_the_sdk_is_trained_once(world: Any, url: str) -> None:
    world.engine.script.append(EngineError("engine", "busy", "is swapping", "ask again"))
    world.engine.say("yes")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=world.key, max_retries=1, timeout=60) as client:
        reply = await client.messages.create(model="actor", max_tokens=9, messages=[USER])
    assert reply.content[0].text == "yes"
    assert [call.index for call in world.close()] == [0]


async def test_tokens_are_counted_without_a_call(world: Any, claude: Any) -> None:
    world.engine.say("yes")
    counted = await claude.messages.count_tokens(model="actor", messages=[USER], tools=TOOLS, system="s")
    reply = await claude.messages.create(model="actor", max_tokens=9, messages=[USER], tools=TOOLS, system="s")
    assert counted.input_tokens == reply.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="other", messages=[USER])
    assert len(world.close()) == 1


async def test_models_come_in_the_shape_that_is_asked_for(claude: Any, agent: Any) -> None:
    (model,) = [model async for model in claude.models.list()]
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("actor", "model", "actor", 1000)
    assert (await claude.models.retrieve("actor")).id == "actor"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.models.retrieve("other")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert [model.object async for model in agent.models.list()] == ["model"]


@pytest.mark.parametrize("body", [b"{", b"\x80\x04", b'{"model":"actor"}', b"[]"])
async def test_bodies_and_paths_that_are_none_get_anthropic_errors(post: Any, body: bytes) -> None:
    reply = await post("/v1/messages", body)
    error = json.loads(reply.body)
    assert (reply.status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["request_id"] == reply.headers["request-id"]
    for path, method, status in (("/v1/messages/batches", "POST", 404), ("/v1/messages", "GET", 405)):
        reply = await post(path, method=method, anthropic_version="2023-06-01")
        assert (reply.status, json.loads(reply.body)["type"]) == (status, "error")


async def test_an_agent_that_hangs_up_cancels_its_call(world: Any, claude: Any, until: Any) -> None:
    asked = {"model": "actor", "max_tokens": 9, "messages": [USER]}
    call = asyncio.ensure_future(claude.messages.create(**asked))
    await until(lambda: world.engine.held)
    call.cancel()
    await until(lambda: world.engine.cancelled)
    stream = await claude.messages.create(**asked, stream=True)
    assert (await anext(aiter(stream))).type == "message_start"
    await stream.close()
    await until(lambda: len(world.engine.cancelled) == 2)
    assert world.engine.cancelled == list(world.engine.held)
    assert world.close() == []


async def test_a_stream_that_fails_raises_in_the_sdk(world: Any, claude: Any, until: Any) -> None:
    stream = await claude.messages.create(model="actor", max_tokens=9, messages=[USER], stream=True)
    await until(lambda: world.engine.held)
    (future,) = world.engine.held.values()
    future.set_exception(EngineError("engine", "down", "is closed", "restart"))
    with pytest.raises(anthropic.APIStatusError, match="is closed") as failed:
        async for _ in stream:
            pass
    assert failed.value.body["error"]["type"] == "api_error" and failed.value.body["request_id"]


async def test_the_end_of_the_episode_ends_a_stream(world: Any, claude: Any, until: Any) -> None:
    stream = await claude.messages.create(model="actor", max_tokens=9, messages=[USER], stream=True)
    await until(lambda: world.engine.held)
    assert world.close() == [] and world.engine.cancelled == list(world.engine.held)
    with pytest.raises(anthropic.APIStatusError, match="episode that is over"):
        async for _ in stream:
            pass
