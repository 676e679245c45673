"""What a Responses request means as a chat completion."""

from __future__ import annotations

import json
from typing import Any

import pytest

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest, FunctionCall, ToolCall
from astraflow.rollout.gateway.dialects.responses.request import chat_request, messages_of, read_request
from astraflow.rollout.gateway.messages import assistant_key, read_messages

USER = {"role": "user", "content": "hi"}


def chat(given: Any, stored: dict[str, Any] | None = None, **fields: Any) -> ChatRequest:
    request = read_request(json.dumps({"model": "actor", "input": given} | fields).encode())
    return chat_request(request, messages_of(request.input, (stored or {}).get))


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def called(number: int, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": f"call_0_{number}", "name": "f", "arguments": arguments,
            "status": "completed"}  # fmt: skip


def returned(number: int, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_0_{number}", "output": output}


def test_a_string_is_a_user_message_after_the_instructions() -> None:
    asked = chat("hi", instructions="be short", max_output_tokens=5, temperature=0.1, reasoning={"effort": "low"})
    assert asked.messages == [{"role": "system", "content": "be short"}, USER]
    assert (asked.max_completion_tokens, asked.temperature, asked.tools) == (5, 0.1, None)


def test_the_items_of_a_turn_come_back_under_its_key() -> None:
    first, second = ToolCall("call_0_0", FunctionCall("f", '{"x":1}')), ToolCall("call_0_1", FunctionCall("f", "{}"))
    items = [USER, said("so"), called(0, '{"x": 1.0}'), called(1), returned(0, "3"), returned(1, "4")]
    asked = chat(items)
    assert [m["role"] for m in asked.messages] == ["user", "assistant", "tool", "tool"]
    assert read_messages(asked.messages)[0][1] == assistant_key("so", [first, second])
    assert asked.messages[3] == {"role": "tool", "tool_call_id": "call_0_1", "content": "4"}
    alone = chat([USER, called(0, '{"x":1}'), said(" after"), returned(0, [{"type": "input_text", "text": "3"}])])
    assert read_messages(alone.messages)[0][1] == assistant_key(" after", [first])
    assert alone.messages[2]["content"] == "3"
    two = chat([USER, said("one"), said("two"), USER])
    assert [m["content"] for m in two.messages] == ["hi", "one", "two", "hi"]


def test_thoughts_belong_to_the_turn_that_follows() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    hidden = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"}
    asked = chat([USER, thought, said("so"), called(0), returned(0, ""), hidden, said("done"), USER])
    assert asked.messages[1]["reasoning_content"] == "hm" and len(asked.messages[1]["tool_calls"]) == 1
    assert asked.messages[3] == {"role": "assistant", "content": "done"}
    assert "reasoning_content" not in chat([thought, USER]).messages[0]


def test_content_parts_are_joined_and_a_refusal_is_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert chat([{"type": "message", "role": "developer", "content": parts}]).messages[0]["content"] == "ab"
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert chat([USER, refusal, USER]).messages[1] == {"role": "assistant", "content": "no"}


def test_an_item_reference_stands_for_the_stored_item() -> None:
    asked = chat([USER, {"type": "item_reference", "id": "msg_1"}, USER], {"msg_1": said("yes")})
    assert asked.messages[1] == {"role": "assistant", "content": "yes"}
    with pytest.raises(GatewayError, match=r"input\[0\].id=msg_2 is not an item") as caught:
        chat([{"type": "item_reference", "id": "msg_2"}])
    assert caught.value.status == 404


def test_functions_their_choice_and_the_format() -> None:
    schema = {"type": "object", "properties": {}}
    tool = {"type": "function", "name": "f", "description": None, "parameters": schema, "strict": True}
    shape = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
    asked = chat(
        "hi", tools=[tool], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False,
        text={"format": shape, "verbosity": "low"}, include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    assert asked.tools == [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert asked.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert (asked.parallel_tool_calls, asked.logprobs, asked.top_logprobs) == (False, True, 2)
    assert asked.response_format["json_schema"] == {"name": "s", "schema": schema, "strict": True}
    assert chat("hi", text={"format": {"type": "text"}}).response_format == {"type": "text"}


IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}


@pytest.mark.parametrize(
    ("given", "fields", "message"),
    [
        ([{"role": "user", "content": [IMAGE]}], {}, r"input\[0\].content\[0\].type=input_image is not a text part"),
        ([{"role": "tool", "content": "x"}], {}, r"input\[0\].role=tool is not a role"),
        ([{"type": "computer_call"}], {}, r"input\[0\].type=computer_call is not served"),
        ([{"type": "function_call", "name": "f"}], {}, r"input\[0\]=.* is not an item of its type .*call_id"),
        ([returned(0, [IMAGE])], {}, "type=input_image is not a text part"),
        ("hi", {"tools": [{"type": "web_search"}]}, r"tools\[0\].type=web_search is not served"),
        ("hi", {"tools": [{"type": "function"}]}, r"tools\[0\].name=None must be a string"),
        ("hi", {"conversation": "conv_1"}, "conversation=conv_1 is not served"),
        ("hi", {"prompt": {"id": "p"}}, "prompt=.* is not served"),
        ("hi", {"truncation": "auto"}, "truncation=auto must be 'disabled'"),
        (3, {}, "is not a Responses request"),
    ],
)
def test_what_policies_do_not_take_is_named(given: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GatewayError, match=message) as caught:
        chat(given, **fields)
    assert caught.value.status == 400
