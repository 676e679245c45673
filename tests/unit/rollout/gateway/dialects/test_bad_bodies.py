"""Whatever an agent sends is served or refused by name; nothing else is ever raised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.calls.options import check_options
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.dialects.anthropic import request as anthropic
from astraflow.rollout.gateway.dialects.completions import request as completions
from astraflow.rollout.gateway.dialects.responses import request as responses

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
ANTHROPIC = {
    "model": "actor", "max_tokens": 9, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["X"],
    "tools": [{"name": "f", "input_schema": SCHEMA, "type": "custom"}], "tool_choice": {"type": "auto"},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "call_0_0", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0_0", "content": [
            {"type": "text", "text": "one"}
        ]}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "actor", "instructions": "s", "include": ["message.output_text.logprobs"], "metadata": {"a": "b"},
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "auto",
    "text": {"format": {"type": "text"}}, "max_output_tokens": 9,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "call_0_0", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_0_0", "output": "one"},
    ],
}  # fmt: skip
COMPLETIONS = {"model": "actor", "prompt": "hi", "max_tokens": 9, "stop": ["X"], "n": 1, "logprobs": 0, "echo": False}


def of_anthropic(body: bytes) -> ChatRequest:
    return anthropic.chat_request(anthropic.read_messages_request(body))


def of_responses(body: bytes) -> ChatRequest:
    asked = responses.read_request(body)
    return responses.chat_request(asked, responses.messages_of(asked.input, {}.get))


def of_completions(body: bytes) -> ChatRequest:
    return completions.raw_request(completions.read_request(body))


Path = tuple[Any, ...]


def places(value: Any, at: Path = ()) -> list[Path]:
    """Of every value in a JSON value."""
    found = [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*at, key))
    return found


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | st.text("ab<\n", max_size=4)
    | st.sampled_from(["image", "tool_result", "item_reference", "function_call", "assistant", "auto", "actor"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "role", "content", "id", "name", "text", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "translate"), [(ANTHROPIC, of_anthropic), (RESPONSES, of_responses), (COMPLETIONS, of_completions)]
)
@given(st.data())
def test_one_wrong_value_anywhere(
    make_world: Any, whole: dict[str, Any], translate: Callable[[bytes], ChatRequest], data: st.DataObject
) -> None:
    world = make_world()
    body = copy.deepcopy(whole)
    place = data.draw(st.sampled_from(places(whole)[1:]))
    junk = data.draw(JUNK)
    holder: Any = body
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = junk
    try:
        asked = translate(json.dumps(body).encode())
        check_options(asked)
        assert world.gateway.prompt_tokens(world.key, asked) > 0
    except GatewayError as error:
        assert error.status in (400, 404)
        assert len(str(error)) < 2000


@pytest.mark.parametrize(("whole", "translate"), [(ANTHROPIC, of_anthropic), (RESPONSES, of_responses)])
def test_the_bodies_themselves_are_served(make_world: Any, whole: dict[str, Any], translate: Any) -> None:
    world = make_world()
    asked = translate(json.dumps(whole).encode())
    assert world.gateway.prompt_tokens(world.key, asked) > 20
