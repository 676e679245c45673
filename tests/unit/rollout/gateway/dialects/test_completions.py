"""OpenAI's legacy Completions through its own SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from astraflow.errors import EngineError


async def test_a_completion(world: Any, agent: Any) -> None:
    world.engine.say("yes")
    reply = await agent.completions.create(model="actor", prompt="hi ", max_tokens=9, temperature=0.1)
    (choice,) = reply.choices
    assert (reply.object, choice.text, choice.finish_reason, choice.index) == ("text_completion", "yes", "stop", 0)
    assert reply.usage.prompt_tokens == 3 and reply.usage.completion_tokens == 4 and reply.id.startswith("cmpl-")
    assert world.prompt_text() == "hi "
    assert len(world.close()) == 1


async def test_a_tool_call_in_raw_text_stays_text(world: Any, agent: Any, say: Any) -> None:
    world.engine.say(say.call(1))
    assert (await agent.completions.create(model="actor", prompt="hi")).choices[0].text == say.call(1)


async def test_ids_go_to_the_engine_as_they_are(world: Any, agent: Any, fakes: Any) -> None:
    world.engine.say("yes", "no")
    ids = [fakes.IDS["he"], fakes.IDS["llo"]]
    for prompt in (ids, [ids]):
        await agent.completions.create(model="actor", prompt=prompt)
        assert world.engine.requests[-1][1] == ids


@pytest.mark.parametrize("streamed", [False, True])
async def test_three_turns_reuse_every_id(world: Any, agent: Any, say: Any, streamed: bool) -> None:
    async def ask(prompt: str) -> str:
        reply = await agent.completions.create(model="actor", prompt=prompt, stream=streamed)
        if streamed:
            return "".join([chunk.choices[0].text async for chunk in reply])
        return str(reply.choices[0].text)

    for text in ("hello", "hello hello", "bye"):
        world.engine.say_pieces(*say.spelled(text))
    prompt = "Q:"
    for added in ("\nQ:", "</s>\nQ:", ""):  # one agent writes the EOS itself, one does not
        prompt += await ask(prompt) + added
    first, second, third = world.close()
    assert second.prompt_ids.tolist()[:-3] == [*first.prompt_ids.tolist(), *first.generation.token_ids.tolist()[:-1]]
    assert third.prompt_ids.tolist()[:-3] == [*second.prompt_ids.tolist(), *second.generation.token_ids.tolist()]


async def test_several_choices(world: Any, agent: Any) -> None:
    world.engine.say("one", "two")
    reply = await agent.completions.create(model="actor", prompt="hi", n=2, best_of=2)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "one"), (1, "two")]
    world.engine.say("one", "two")
    stream = await agent.completions.create(model="actor", prompt="hi", n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["one", "two"]


async def test_a_stream_says_the_same_as_a_completion(world: Any, agent: Any) -> None:
    world.engine.say("word " * 20)
    stream = await agent.completions.create(
        model="actor", prompt="hi", stream=True, echo=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "hi" + "word " * 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 101
    assert {c.id for c in chunks} == {chunks[0].id}


async def test_stops_echo_and_logprobs(world: Any, agent: Any) -> None:
    world.engine.say("one STOP two", "hello")
    reply = await agent.completions.create(model="actor", prompt="hi", stop=["STOP"], echo=True)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("hione ", "stop")
    reply = await agent.completions.create(model="actor", prompt="hi", logprobs=0)
    logprobs = reply.choices[0].logprobs
    assert (logprobs.tokens[0], logprobs.text_offset[:2], logprobs.token_logprobs[0]) == ("hello", [0, 5], -2.0)
    world.engine.say("hello")
    stream = await agent.completions.create(model="actor", prompt="hi", logprobs=0, stream=True)
    rows = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs is not None]
    assert [token for row in rows for token in row.tokens] == logprobs.tokens
    assert [offset for row in rows for offset in row.text_offset] == logprobs.text_offset


async def test_errors_reach_the_sdk_as_its_exceptions(world: Any, agent: Any) -> None:
    create = agent.completions.create
    for options, message in (
        ({"prompt": ["a", "b"]}, "prompt=2 prompts must be one"),
        ({"prompt": ""}, "prompt= must not be empty"),
        ({"prompt": [9999]}, r"prompt\[0\]=9999 must be a token id below"),
        ({"prompt": "a", "suffix": "b"}, "suffix=b is not served"),
        ({"prompt": "a", "best_of": 3}, "best_of=3 must be n"),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "echo=True cannot go with logprobs"),
        ({"prompt": [7], "echo": True}, "echo=True needs a prompt of text"),
        ({"prompt": {"a": 1}}, "is not a completion request"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=message):
                await create(model="actor", stream=stream, **options)
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="actor", prompt="x" * 1001)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await create(model="other", prompt="a")
    world.engine.script.append(EngineError("engine", "down", "is closed", "restart"))
    with pytest.raises(openai.InternalServerError):
        await create(model="actor", prompt="a")


async def test_an_agent_that_hangs_up_cancels_its_call(world: Any, agent: Any, until: Any) -> None:
    call = asyncio.ensure_future(agent.completions.create(model="actor", prompt="hi"))
    await until(lambda: world.engine.held)
    call.cancel()
    await until(lambda: world.engine.cancelled)
    stream = await agent.completions.create(model="actor", prompt="hi", stream=True)
    await stream.close()
    await until(lambda: len(world.engine.cancelled) == 2)
    assert world.close() == []


async def test_a_stream_that_fails_raises_in_the_sdk(world: Any, agent: Any, until: Any) -> None:
    stream = await agent.completions.create(model="actor", prompt="hi", stream=True)
    await until(lambda: world.engine.held)
    (future,) = world.engine.held.values()
    future.set_exception(EngineError("engine", "down", "is closed", "restart"))
    with pytest.raises(openai.APIError, match="is closed"):
        async for _ in stream:
            pass


async def test_a_retry_of_the_sdk_is_trained_once(world: Any, url: str) -> None:
    world.engine.script.append(EngineError("engine", "busy", "is swapping", "ask again"))
    world.engine.say("yes")
    async with openai.AsyncOpenAI(base_url=url, api_key=world.key, max_retries=1, timeout=60) as client:
        assert (await client.completions.create(model="actor", prompt="hi")).choices[0].text == "yes"
    assert [call.index for call in world.close()] == [0]
