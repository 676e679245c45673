"""OpenAI's Responses through its own SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from astraflow.errors import EngineError

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "strict": False}  # fmt: skip
USER = {"role": "user", "content": "hi"}


async def test_a_response(world: Any, agent: Any) -> None:
    world.engine.say("yes")
    reply = await agent.responses.create(
        model="actor", input="hi", instructions="be short", max_output_tokens=9, metadata={"a": "b"}
    )
    assert (reply.object, reply.status, reply.output_text, reply.model) == ("response", "completed", "yes", "actor")
    assert (reply.instructions, reply.metadata, reply.max_output_tokens) == ("be short", {"a": "b"}, 9)
    assert reply.usage.input_tokens == len(world.engine.requests[0][1]) and reply.usage.output_tokens == 4
    assert reply.usage.total_tokens == reply.usage.input_tokens + 4
    (item,) = reply.output
    assert (item.type, item.role, item.status, item.content[0].type) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    assert world.prompt_text() == "<s><|system|>be short</s>\n<|user|>hi</s>\n<|assistant|>"
    assert len(world.close()) == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kept", ["items", "dumped", "previous", "references"])
async def test_three_turns_with_tools_reuse_every_id(
    world: Any, agent: Any, say: Any, unbroken: Any, streamed: bool, kept: str
) -> None:
    history: list[Any] = []
    last: Any = None

    async def ask(*new: Any) -> Any:
        nonlocal last
        asked: dict[str, Any] = {"model": "actor", "tools": [TOOL], "instructions": "s"}
        if kept == "previous":
            asked |= {"input": list(new), "previous_response_id": last.id if last else None}
        else:
            history.extend(new)
            asked["input"] = history
        if streamed:
            async with agent.responses.stream(**asked) as stream:
                last = await stream.get_final_response()
        else:
            last = await agent.responses.create(**asked)
        for item in last.output:
            whole = item.model_dump(mode="json") if kept == "dumped" else item
            history.append({"type": "item_reference", "id": item.id} if kept == "references" else whole)
        return last

    def output(call: Any, value: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call.call_id, "output": value}

    for text in ("hello " + say.call(1) + say.call(2), say.call(3), "hello", "bye"):
        world.engine.say_pieces(*say.spelled(text))
    first = await ask(USER)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    calls = first.output[1:]
    assert [json.loads(call.arguments) for call in calls] == [{"x": 1}, {"x": 2}]
    second = await ask(output(calls[0], "one"), output(calls[1], [{"type": "input_text", "text": "two"}]))
    assert [item.type for item in second.output] == ["function_call"]
    third = await ask(output(second.output[0], "three"))
    assert (third.output_text, third.status) == ("hello", "completed")
    await ask({"role": "user", "content": [{"type": "input_text", "text": "more"}]})
    assert "<|tool|>one</s>\n<|tool|>two</s>\n" in world.prompt_text(1)
    unbroken(4)


async def test_the_events_of_a_stream_in_their_order(world: Any, agent: Any, say: Any) -> None:
    world.engine.say("so " + say.call(1))
    stream = await agent.responses.create(model="actor", input="hi", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    by_kind = {event.type.removeprefix("response."): event for event in events}
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta") == by_kind["output_text.done"].text
    )
    assert by_kind["output_text.done"].text.strip() == "so"
    call = by_kind["output_item.done"].item
    assert (call.type, call.name, call.call_id, call.status) == ("function_call", "f", "call_0_0", "completed")
    assert json.loads(by_kind["function_call_arguments.done"].arguments) == {"x": 1}
    final = by_kind["completed"].response
    assert (final.status, final.id) == ("completed", events[0].response.id)
    assert final.output[1].id == call.id and final.usage.output_tokens > 0
    assert (await agent.responses.retrieve(final.id)).output == final.output


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_reply_that_was_cut_is_incomplete_and_can_be_continued(world: Any, agent: Any, streamed: bool) -> None:
    world.engine.cut("hello")
    if streamed:
        stream = await agent.responses.create(model="actor", input="hi", max_output_tokens=1, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        reply = last.response
    else:
        reply = await agent.responses.create(model="actor", input="hi", max_output_tokens=1)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    world.engine.say("yes")
    await agent.responses.create(model="actor", input="go on", previous_response_id=reply.id)
    assert "hello</s>\n<|user|>go on" in world.prompt_text()


async def test_an_empty_turn_comes_back_as_one(world: Any, agent: Any, unbroken: Any) -> None:
    world.engine.say("", "yes")
    first = await agent.responses.create(model="actor", input=[USER])
    assert first.output_text == "" and len(first.output) == 1
    await agent.responses.create(model="actor", input=[USER, *first.output, USER])
    unbroken(2)


async def test_logprobs_of_the_sampled_tokens(world: Any, agent: Any) -> None:
    for stream in (False, True):
        world.engine.say("hello")
        asked = {"model": "actor", "input": "hi", "include": ["message.output_text.logprobs"], "stream": stream}
        reply = await agent.responses.create(**asked)
        if stream:
            reply = [event async for event in reply][-1].response
        assert [row.token for row in reply.output[0].content[0].logprobs][:1] == ["hello"]


async def test_stored_responses_are_given_and_deleted(world: Any, agent: Any) -> None:
    world.engine.say("one", "two", "three")
    first = await agent.responses.create(model="actor", input="a")
    second = await agent.responses.create(model="actor", input="b", previous_response_id=first.id)
    assert await agent.responses.retrieve(first.id) == first
    await agent.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not a response of this episode"):
        await agent.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        await agent.responses.create(model="actor", input="c", previous_response_id=first.id)
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    third = await agent.responses.create(model="actor", input="c", previous_response_id=second.id, store=False)
    assert "a</s>\n<|assistant|>one</s>" in world.prompt_text()  # what the deleted one said is still said
    with pytest.raises(openai.NotFoundError):
        await agent.responses.retrieve(third.id)
    with pytest.raises(openai.BadRequestError, match="was not made in the background"):
        await agent.responses.cancel(second.id)
    with pytest.raises(openai.NotFoundError):
        await agent.responses.delete("resp_none")


async def test_responses_end_with_their_episode(world: Any, agent: Any, url: str, fakes: Any) -> None:
    world.engine.say("one")
    first = await agent.responses.create(model="actor", input="a")
    other = world.gateway.open_episode(fakes.lease(episode_id="train/0/8/0"))
    async with openai.AsyncOpenAI(base_url=url, api_key=other, max_retries=0) as stranger:
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.retrieve(first.id)
    world.close()
    with pytest.raises(openai.APIStatusError) as gone:
        await agent.responses.retrieve(first.id)
    assert gone.value.status_code == 410


async def test_a_response_in_the_background_is_made_and_asked_for(world: Any, agent: Any, until: Any) -> None:
    reply = await agent.responses.create(model="actor", input="hi", background=True)
    assert (reply.status, reply.background, reply.output) == ("in_progress", True, [])
    with pytest.raises(openai.BadRequestError, match="has no answer"):
        await agent.responses.create(model="actor", input="hi", previous_response_id=reply.id)
    (request_id,) = world.engine.held
    world.engine.release(request_id, "yes")
    while (reply := await agent.responses.retrieve(reply.id)).status == "in_progress":
        pass
    assert (reply.status, reply.output_text) == ("completed", "yes")
    assert (await agent.responses.cancel(reply.id)).status == "completed"
    assert len(world.close()) == 1


async def test_cancelling_stops_the_engine(world: Any, agent: Any) -> None:
    reply = await agent.responses.create(model="actor", input="hi", background=True)
    cancelled = await agent.responses.cancel(reply.id)
    assert (cancelled.id, cancelled.status) == (reply.id, "cancelled")
    assert world.engine.cancelled == list(world.engine.held)
    with pytest.raises(openai.BadRequestError, match="cannot go with stream"):
        await agent.responses.create(model="actor", input="hi", background=True, stream=True)
    with pytest.raises(openai.BadRequestError, match="needs store"):
        await agent.responses.create(model="actor", input="hi", background=True, store=False)
    assert world.close() == []


async def test_what_is_deleted_stops_its_engine_and_is_referred_to_no_more(world: Any, agent: Any, until: Any) -> None:
    reply = await agent.responses.create(model="actor", input="hi", background=True)
    await agent.responses.delete(reply.id)
    await until(lambda: world.engine.cancelled)
    world.engine.say("one")
    reply = await agent.responses.create(model="actor", input="hi")
    await agent.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError, match="is not an item of this episode"):
        await agent.responses.create(model="actor", input=[{"type": "item_reference", "id": reply.output[0].id}])


async def test_an_agent_that_hangs_up_cancels_its_call(world: Any, agent: Any, until: Any) -> None:
    call = asyncio.ensure_future(agent.responses.create(model="actor", input="hi"))
    await until(lambda: world.engine.held)
    call.cancel()
    await until(lambda: world.engine.cancelled)
    stream = await agent.responses.create(model="actor", input="hi", stream=True)
    assert (await anext(aiter(stream))).type == "response.created"
    await stream.close()
    await until(lambda: len(world.engine.cancelled) == 2)
    assert world.engine.cancelled == list(world.engine.held)
    assert world.close() == []


async def test_a_stream_that_fails_says_so_and_ends(world: Any, agent: Any, until: Any) -> None:
    stream = await agent.responses.create(model="actor", input="hi", stream=True)
    await until(lambda: world.engine.held)
    (future,) = world.engine.held.values()
    future.set_exception(EngineError("engine", "down", "is closed", "restart"))
    events = [event async for event in stream]
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert "is closed" in events[-1].response.error.message
    assert world.close() == []


async def test_errors_reach_the_sdk_as_its_exceptions(world: Any, agent: Any, url: str) -> None:
    create = agent.responses.create
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="known: actor"):
            await create(model="gpt-6", input="hi", stream=stream)
        with pytest.raises(openai.BadRequestError, match="type=web_search is not served") as bad:
            await create(model="actor", input="hi", tools=[{"type": "web_search"}], stream=stream)
        assert bad.value.param == "tools[0].type"
        with pytest.raises(openai.BadRequestError, match=r"JSON [Ss]chema"):
            await create(model="actor", input="hi", tools=[TOOL | {"parameters": {"type": 5}}], stream=stream)
        with pytest.raises(openai.BadRequestError, match="response_format=json_schema must be"):
            shape = {"type": "json_schema", "name": "s", "schema": {}}
            await create(model="actor", input="hi", text={"format": shape}, stream=stream)
        with pytest.raises(openai.BadRequestError) as long:
            await create(model="actor", input="x" * 1000, stream=stream)
        assert long.value.code == "context_length_exceeded"
        world.engine.script.append(EngineError("engine", "down", "is closed", "restart"))
        with pytest.raises(openai.InternalServerError, match="is closed"):
            await create(model="actor", input="hi", stream=stream)
        async with openai.AsyncOpenAI(base_url=url, api_key="af-guess", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(model="actor", input="hi", stream=stream)


async def test_a_retry_of_the_sdk_is_trained_once(world: Any, url: str) -> None:
    world.engine.script.append(EngineError("engine", "busy", "is swapping", "ask again"))
    world.engine.say("yes")
    async with openai.AsyncOpenAI(base_url=url, api_key=world.key, max_retries=1, timeout=60) as client:
        reply = await client.responses.create(model="actor", input="hi")
    assert reply.output_text == "yes"
    assert [call.index for call in world.close()] == [0]
