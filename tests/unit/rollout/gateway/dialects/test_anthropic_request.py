"""What an Anthropic request means as a chat completion."""

from __future__ import annotations

import json
from typing import Any

import pytest

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest, FunctionCall, ToolCall
from astraflow.rollout.gateway.dialects.anthropic.request import (
    chat_request,
    read_count_request,
    read_messages_request,
)
from astraflow.rollout.gateway.messages import assistant_key, read_messages

USER = {"role": "user", "content": "hi"}


def chat(messages: list[Any], **fields: Any) -> ChatRequest:
    body = {"model": "actor", "max_tokens": 9, "messages": messages} | fields
    return chat_request(read_messages_request(json.dumps(body).encode()))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(number: int, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"call_0_{number}", "name": "f", "input": given}


def result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"call_0_{number}", "content": content} | more


def test_system_texts_and_options() -> None:
    asked = chat(
        [{"role": "user", "content": [text("a"), text("b") | {"cache_control": {"type": "ephemeral"}}]}],
        system=[text("one"), text("two")], stop_sequences=["X"], temperature=0.5, top_p=0.9, top_k=4, stream=True,
        metadata={"user_id": "u"}, thinking={"type": "adaptive"}, service_tier="auto",
    )  # fmt: skip
    assert asked.messages == [{"role": "system", "content": "one\ntwo"}, {"role": "user", "content": "ab"}]
    assert (asked.model, asked.max_tokens, asked.stop, asked.stream) == ("actor", 9, ["X"], True)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.tools) == (0.5, 0.9, 4, None)
    assert chat([USER], system="s").messages[0] == {"role": "system", "content": "s"}


def test_an_assistant_turn_comes_back_under_its_key() -> None:
    turn = {"role": "assistant", "content": [text("so"), use(0, x=1), use(1, y=[2.0])]}
    asked = chat([USER, turn, {"role": "user", "content": [result(0, "3"), result(1, "4")]}])
    calls = [ToolCall("call_0_0", FunctionCall("f", '{"x": 1}')), ToolCall("call_0_1", FunctionCall("f", '{"y":[2]}'))]
    assert read_messages(asked.messages)[0][1] == assistant_key("so", calls)
    alone = chat([USER, {"role": "assistant", "content": [use(0)]}, USER])
    assert read_messages(alone.messages)[0][1] == assistant_key("", [ToolCall("call_0_0", FunctionCall("f", "{}"))])
    for content in ("yes", [text("yes")], [text("ye"), text("s")]):
        plain = chat([USER, {"role": "assistant", "content": content}, USER])
        assert read_messages(plain.messages)[0][1] == assistant_key("yes", [])


def test_thoughts_go_where_the_template_looks_for_them() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    blocks = [thought, {"type": "redacted_thinking", "data": "x"}, text("yes")]
    asked = chat([USER, {"role": "assistant", "content": blocks}, USER])
    assert asked.messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_each_tool_result_is_a_message_in_its_place() -> None:
    blocks = [
        result(0, "3"), result(1, [text("4"), text("5")]), result(2, "no", is_error=True), {"type": "tool_result",
        "tool_use_id": "call_0_3"}, text("go "), text("on"),
    ]  # fmt: skip
    assert chat([{"role": "user", "content": blocks}]).messages == [
        {"role": "tool", "tool_call_id": "call_0_0", "content": "3"},
        {"role": "tool", "tool_call_id": "call_0_1", "content": "45"},
        {"role": "tool", "tool_call_id": "call_0_2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "call_0_3", "content": ""},
        {"role": "user", "content": "go on"},
    ]
    assert chat([{"role": "user", "content": []}]).messages == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], meant: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [{"name": "f", "description": "d", "input_schema": schema, "type": "custom"}]
    asked = chat([USER], tools=tools, tool_choice=choice)
    function = {"name": "f", "description": "d", "parameters": schema}
    assert (asked.tools, asked.tool_choice) == ([{"type": "function", "function": function}], meant)
    assert asked.parallel_tool_calls is None
    assert chat([USER], tool_choice=choice | {"disable_parallel_tool_use": True}).parallel_tool_calls is False


def test_an_output_schema_is_a_response_format() -> None:
    schema = {"type": "object"}
    asked = chat([USER], output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert asked.response_format == {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        ([USER, {"role": "assistant", "content": "So"}], {}, r"messages\[1\].role=assistant must not be last"),
        ([{"role": "robot", "content": "x"}], {}, r"messages\[0\].role=robot"),
        ([{"role": "user", "content": [text("x"), IMAGE]}], {}, r"messages\[0\].content\[1\].type=image cannot"),
        ([{"role": "user", "content": [result(0, [IMAGE])]}], {}, r"content\[0\].content\[0\].type=image cannot"),
        ([{"role": "user", "content": [use(0)]}], {}, "type=tool_use cannot be in a turn of user"),
        ([{"role": "assistant", "content": [result(0, "")]}, USER], {}, "type=tool_result cannot"),
        ([{"role": "user", "content": [{"type": "video"}]}], {}, "Invalid value 'video'"),
        ([USER], {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "type=web_search_20250305 is a"),
        ([USER], {"tools": [{"name": "f"}]}, r"tools\[0\].input_schema=None must be"),
        ([USER], {"container": "c"}, "container=c is not served"),
        ([USER], {"mcp_servers": [{"url": "x"}]}, "mcp_servers=.* is not served"),
        ([USER], {"max_tokens": None}, r"is not a Messages request .*max_tokens"),
        ("hi", {}, "is not a Messages request"),
    ],
)
def test_what_policies_do_not_take_is_named(messages: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GatewayError, match=message) as caught:
        chat(messages, **fields)
    assert caught.value.status == 400


def test_counting_needs_no_limit() -> None:
    body = json.dumps({"model": "actor", "messages": [USER], "system": "s"}).encode()
    assert [m["role"] for m in chat_request(read_count_request(body)).messages] == ["system", "user"]
    with pytest.raises(GatewayError, match="is not a Messages request"):
        read_count_request(b"\x80")
