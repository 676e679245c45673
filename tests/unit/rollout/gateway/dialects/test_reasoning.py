"""Thoughts that a parser tells apart go out in each dialect's own form, and come back as part of their turn."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.rollout.gateway.tools import Opening, Piece, Thought

USER = {"role": "user", "content": "hi"}


class Thinks:
    """`(thought)answer`; pieces come as the policy writes them."""

    always = True

    def open(self, opening: Opening) -> Thinks.Reader:
        return self.Reader()

    class Reader:
        def __init__(self) -> None:
            self.num_malformed, self._thinking = 0, False

        def feed(self, text: str) -> list[Piece]:
            pieces: list[Piece] = []
            for char in text:
                if char in "()":
                    self._thinking = char == "("
                else:
                    pieces.append(Thought(char) if self._thinking else char)
            return pieces

        def end(self) -> list[Piece]:
            return []


@pytest.fixture(autouse=True)
def thinks(world: Any) -> None:
    world.gateway._policies["actor"].tool_parser = Thinks()
    world.engine.say("(so be it)yes", "(well)no", "done")


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropic_thinking_blocks(world: Any, claude: Any, unbroken: Any, streamed: bool) -> None:
    messages: list[Any] = [USER]
    for thought, text in (("so be it", "yes"), ("well", "no"), (None, "done")):
        asked = {"model": "actor", "max_tokens": 99, "messages": messages}
        if streamed:
            async with claude.messages.stream(**asked) as stream:
                reply = await stream.get_final_message()
        else:
            reply = await claude.messages.create(**asked)
        *thoughts, said = reply.content
        assert [block.thinking for block in thoughts] == ([thought] if thought else []) and said.text == text
        messages += [reply.to_param(), USER]
    unbroken(3)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_reasoning_items(world: Any, agent: Any, unbroken: Any, streamed: bool, by_id: bool) -> None:
    items: list[Any] = [USER]
    last = None
    for thought, text in (("so be it", "yes"), ("well", "no"), (None, "done")):
        asked: dict[str, Any] = {"model": "actor", "input": items, "previous_response_id": last}
        if streamed:
            async with agent.responses.stream(**asked) as stream:
                reply = await stream.get_final_response()
        else:
            reply = await agent.responses.create(**asked)
        *thoughts, said = reply.output
        assert [item.content[0].text for item in thoughts] == ([thought] if thought else [])
        assert (said.content[0].text, reply.output_text) == (text, text)
        items, last = ([USER], reply.id) if by_id else ([*items, *reply.output, USER], None)
    unbroken(3)


async def test_the_events_of_a_thought(world: Any, agent: Any) -> None:
    stream = await agent.responses.create(model="actor", input="hi", stream=True)
    kinds = [event.type.removeprefix("response.") async for event in stream]
    assert [kind for at, kind in enumerate(kinds) if not at or kind != kinds[at - 1]][2:9] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done", "output_item.added",
    ]  # fmt: skip


async def test_raw_text_is_not_read(world: Any, agent: Any) -> None:
    assert (await agent.completions.create(model="actor", prompt="hi")).choices[0].text == "(so be it)yes"
