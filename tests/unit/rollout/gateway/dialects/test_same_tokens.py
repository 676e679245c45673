"""One agent, four ways of speaking: what is captured does not depend on the dialect.

Real tokenizers and templates; the engine says tokens that the tokenizer would not choose, and JSON with spaces that the
template would not write, so any text that was tokenised again would show.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import chat_families

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
RESULTS = ("one", "two", "three")


async def chat(url: str, key: str, streamed: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    results = iter(RESULTS)
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for _ in range(4):
            asked: dict[str, Any] = {"model": "actor", "messages": messages, "tools": tools}
            if streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": next(results)})
            if not message.tool_calls:
                messages.append({"role": "user", "content": "more"})


async def responses(url: str, key: str, streamed: bool) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in "fg"]
    items: list[Any] = [{"role": "user", "content": "hi"}]
    results = iter(RESULTS)
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for _ in range(4):
            asked: dict[str, Any] = {"model": "actor", "instructions": "s", "input": items, "tools": tools}
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    reply = await stream.get_final_response()
            else:
                reply = await client.responses.create(**asked)
            items += reply.output
            calls = [item for item in reply.output if item.type == "function_call"]
            for call in calls:
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": next(results)})
            if not calls:
                items.append({"role": "user", "content": "more"})


async def messages(url: str, key: str, streamed: bool) -> None:
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in "fg"]
    turns: list[Any] = [{"role": "user", "content": "hi"}]
    results = iter(RESULTS)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        for _ in range(4):
            asked: dict[str, Any] = {
                "model": "actor", "max_tokens": 1000, "system": "s", "messages": turns, "tools": tools,
            }  # fmt: skip
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    reply = await stream.get_final_message()
            else:
                reply = await client.messages.create(**asked)
            calls = [block for block in reply.content if block.type == "tool_use"]
            answers = [{"type": "tool_result", "tool_use_id": c.id, "content": next(results)} for c in calls]
            turns += [reply.to_param(), {"role": "user", "content": answers or "more"}]


async def curl(url: str, key: str, streamed: bool) -> None:
    """An agent without an SDK, which knows nothing of ids but sends back what it got."""
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
    history: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    results = iter(RESULTS)
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:  # as a mere HTTP client
        for _ in range(4):
            body = {"model": "actor", "messages": history, "tools": tools}
            reply = json.loads(await client.post("/chat/completions", cast_to=str, body=body))
            message = reply["choices"][0]["message"]
            history.append(message)
            for call in message.get("tool_calls", ()):
                history.append({"role": "tool", "tool_call_id": call["id"], "content": next(results)})
            if not message.get("tool_calls"):
                history.append({"role": "user", "content": "more"})


Play = Callable[[str, str, bool], Awaitable[None]]


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_dialect_captures_the_same(family: str, streamed: bool, tmp_path: Path, served: Any) -> None:
    tokenizer = chat_families.chat_of(family, tmp_path)

    async def captured(play: Play) -> list[tuple[list[int], list[int], bool]]:
        scene = chat_families.Scene(family, tokenizer)
        said = "he·llo " if family == "chatml" else ""  # a turn of llama3 is text or calls
        for text in (said + scene.call_text(f={"x": 1}, g={"x": 2}), scene.call_text(f={"x": 3}), "he·llo", "bye"):
            scene.say(text)
        async with served(scene.gateway) as url:
            await play(url, scene.key, streamed)
        return [(c.prompt_ids.tolist(), c.generation.token_ids.tolist(), c.forked) for c in scene.close()]

    plain = await captured(chat)
    assert len(plain) == 4 and not any(forked for _, _, forked in plain)
    for (prompt, sampled, _), (longer, _, _) in pairwise(plain):
        assert longer[: len(prompt) + len(sampled)] == prompt + sampled
    for play in (responses, messages, curl):
        assert await captured(play) == plain, play.__name__
