"""Conversations as characters, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.errors import ModelError
from astraflow.models.remote.transcript import EOS, EOS_TEXT, VOCAB_SIZE, Transcript, read, spoken
from astraflow.rollout.gateway.tools import HermesParser, Opening, parser_for, read_whole
from astraflow.types import Message

CHAT = Transcript()
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[EOS_TEXT]), max_size=30)
ARGUMENTS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(-(2**53), 2**53), st.lists(st.booleans())), max_size=3)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "calc", "description": 'say "it"\n'}}]


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    for turn in range(draw(st.integers(0, 4))):
        messages.append({"role": draw(st.sampled_from(["user", "system"])), "content": draw(TEXT)})
        calls = [
            {"id": f"call_{turn}_{n}", "type": "function", "function": {"name": "calc", "arguments": arguments}}
            for n, arguments in enumerate(draw(st.lists(ARGUMENTS, max_size=2)))
        ]
        said: Message = {"role": "assistant", "content": draw(TEXT)}
        messages.append({**said, "tool_calls": calls} if calls else said)
        messages += [{"role": "tool", "content": draw(TEXT), "tool_call_id": call["id"]} for call in reversed(calls)]
    return [*messages, {"role": "user", "content": draw(TEXT), "name": "bob"}]


def as_read(messages: list[Message]) -> list[Any]:
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@settings(max_examples=300, deadline=None)
@given(conversations(), st.booleans())
def test_a_conversation_is_read_back_from_its_ids(messages: list[Message], tools: bool) -> None:
    offered = TOOLS if tools else None
    ids = CHAT.encode(CHAT.render(messages, offered, add_generation_prompt=True))
    asked = read(CHAT.decode(ids, False))
    assert as_read(asked.messages) == messages and asked.tools == (offered or [])
    assert ids.min() >= 0 and ids.max() < VOCAB_SIZE


@settings(max_examples=300, deadline=None)
@given(conversations(), TEXT, st.lists(ARGUMENTS, max_size=2), TEXT)
def test_the_next_request_goes_on_where_the_reply_ended(
    messages: list[Message], content: str, arguments: list[dict[str, Any]], more: str
) -> None:
    """As a gateway has it: the agent sends back what the parser read, and its text continues what was sampled."""
    prompt = CHAT.render(messages, TOOLS, add_generation_prompt=True)
    sampled = spoken(content, [("calc", each) for each in arguments])
    said, _, calls = read_whole(HermesParser().open(Opening(TOOLS, 0, prompt)), sampled)
    if "<tool_call>" in content or not said.strip() or (calls and said != said.strip()):
        return  # content that writes a call by itself; white space that no agent gets
    reply: Message = {"role": "assistant", "content": said}
    if calls:
        reply["tool_calls"] = [
            {"id": c.id, "type": "function",
             "function": {"name": c.function.name, "arguments": json.loads(c.function.arguments)}}
            for c in calls
        ]  # fmt: skip
    follow = CHAT.render([*messages, reply, {"role": "user", "content": more}], TOOLS, add_generation_prompt=True)
    assert follow.startswith(prompt + sampled + EOS_TEXT)


def test_calls_are_found_as_they_are_written() -> None:
    assert isinstance(parser_for("auto", CHAT), HermesParser)


@pytest.mark.parametrize("text", ["", "Once upon a time", '{"role":"user"}\nx', '[]\n\x1e{"role":"assistant"}\n',
                                  '{"said":{}}\n\x1e{"role":"assistant"}\n'])  # fmt: skip
def test_what_is_no_conversation_is_said_so(text: str) -> None:
    with pytest.raises(ModelError, match="is no conversation"):
        read(text)


def test_an_end_within_a_text_and_half_a_character_are_replaced() -> None:
    text = CHAT.render([{"role": "user", "content": "a\x1eb"}], None, add_generation_prompt=True)
    assert read(text).messages == [{"role": "user", "content": "a�b"}]
    assert spoken("a\x1eb", []) == "a�b"
    assert CHAT.decode(CHAT.encode("x\ud800y")) == "x�y"
    assert CHAT.decode([65, EOS], skip_special_tokens=True) == "A"
    assert CHAT.decode([65, EOS], skip_special_tokens=False) == "A\x1e"
