"""Readers of tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import Problem
from astraflow.rollout.gateway.dialect import ToolCall
from astraflow.rollout.gateway.tools import (
    BracketParser,
    HermesParser,
    LlamaParser,
    NoParser,
    Opening,
    ToolParser,
    parser_for,
    read_whole,
)

Read = tuple[str, list[tuple[str, str, Any]]]


def read(parser: ToolParser, text: str, tools: Any = ({"type": "function"},)) -> Read:
    content, thoughts, calls = read_whole(parser.open(Opening(tools, 3, "")), text)
    assert thoughts == ""
    return content, [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls]


def malformed(parser: ToolParser, text: str, tools: Any = ({"type": "function"},)) -> int:
    reader = parser.open(Opening(tools, 3, ""))
    read_whole(reader, text)
    return reader.num_malformed


def hermes(text: str) -> Read:
    return read(HermesParser(), text)


DEEP = "[" * 5000 + "]" * 5000
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_hermes_reads_several_calls_and_keeps_the_text_around_them() -> None:
    content, calls = hermes(f"first\n{CALL}\nthen {CALL} last")
    assert content == "first\nthen\nlast"
    assert calls == [("call_3_0", "f", {"x": 1}), ("call_3_1", "f", {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "<tool_call>not json</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        "</tool_call><tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {{"x": {DEEP}}}}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {json.dumps(DEEP)}}}</tool_call>',
    ],
)
def test_hermes_leaves_what_it_cannot_read_as_content(text: str) -> None:
    assert hermes(text) == (text, [])
    assert malformed(HermesParser(), text) == text.count("<tool_call>")


def test_hermes_keeps_a_malformed_call_beside_a_good_one_as_content() -> None:
    bad = "<tool_call>{oops}</tool_call>"
    assert hermes(bad + CALL) == (bad, [("call_3_0", "f", {"x": 1})])


def test_hermes_reads_missing_and_doubly_encoded_arguments() -> None:
    assert hermes('<tool_call>{"name": "f"}</tool_call>')[1] == [("call_3_0", "f", {})]
    doubled = json.dumps({"name": "f", "arguments": json.dumps({"x": "é"})})
    assert hermes(f"<tool_call>{doubled}</tool_call>")[1] == [("call_3_0", "f", {"x": "é"})]


def bracket(text: str, tools: Any) -> Read:
    return read(BracketParser(), text, tools)


def test_bracket_reads_a_whole_reply_in_brackets(fakes: Any) -> None:
    tools = [fakes.tool("calc", expr="string")]
    assert bracket("[3*4]", tools) == ("", [("call_3_0", "calc", {"expr": "3*4"})])
    assert bracket("[any thing]", tools)[1]
    assert malformed(BracketParser(), "[3*4]", tools) == 0


@pytest.mark.parametrize("text", ["[3*4", "3*4]", "[3*4].", " [3*4]", "[]", "[[3*4]]", "[3][4]", "12.", ""])
def test_bracket_leaves_anything_else_as_content(fakes: Any, text: str) -> None:
    tools = [fakes.tool("calc", expr="string")]
    assert bracket(text, tools) == (text, [])
    assert malformed(BracketParser(), text, tools) == (text in ("[3*4", "[]"))


def test_bracket_knows_schemas_that_are_true_or_false() -> None:
    for schema, called in ((True, True), (False, False)):
        tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}
        assert bool(bracket("[3*4]", [tool])[1]) is called


def test_bracket_needs_exactly_one_tool_with_one_string_parameter(fakes: Any) -> None:
    for tools in (
        [],
        [fakes.tool("a", x="string"), fakes.tool("b", x="string")],
        [fakes.tool("a", x="integer")],
        [fakes.tool("a", x="string", y="string")],
        [fakes.tool("a")],
        [{"type": "function"}],
    ):
        assert bracket("[3*4]", tools) == ("[3*4]", [])


def test_llama_reads_objects_that_are_the_whole_reply() -> None:
    one, two = '{"name": "f", "parameters": {"x": "a; }"}}', '{"name": "g", "parameters": {}}'
    assert read(LlamaParser(), one) == ("", [("call_3_0", "f", {"x": "a; }"})])
    both = [("call_3_0", "f", {"x": "a; }"}), ("call_3_1", "g", {})]
    assert read(LlamaParser(), f"\n{one}; {two}") == ("", both)


@pytest.mark.parametrize(
    "text",
    ["plain", "so {}", "{", "{}", '{"name": "f"}', '{"name": "f", "parameters": [1]}', '{"name": 1, "parameters": {}}',
     '{"name": "f", "parameters": {}} so', '{"name": "f", "parameters": {"x": NaN}}',
     '{"name": "f", "parameters": {"x": 1e999}}', '{"name": "f", "parameters": {"x": "\\ud800"}}',
     f'{{"name": "f", "parameters": {{"x": {DEEP}}}}}'],
)  # fmt: skip
def test_llama_leaves_anything_else_as_content(text: str) -> None:
    assert read(LlamaParser(), text) == (text, [])
    assert malformed(LlamaParser(), text) == text.startswith("{")


PIECES = [
    "<tool_call>",
    "</tool_call>",
    CALL,
    '{"name": "f"}',
    "[1+1]",
    "[",
    "<tool",
    "_call>",
    " ",
    "\n",
    "word",
    "{",
    ";",
]


@pytest.mark.parametrize("parser", [HermesParser(), LlamaParser(), BracketParser()])
@given(texts=st.lists(st.sampled_from(PIECES), max_size=8), cuts=st.lists(st.integers(1, 12), max_size=40))
def test_what_is_read_does_not_depend_on_how_the_text_came(parser: Any, texts: list[str], cuts: list[int]) -> None:
    text = "".join(texts)
    tools = [{"function": {"name": "calc", "parameters": {"properties": {"x": {"type": "string"}}}}}]
    whole, pieced = (parser.open(Opening(tools, 0, "")) for _ in range(2))
    pieces, at = [], 0
    for cut in cuts:
        pieces += pieced.feed(text[at : at + cut])
        at += cut
    pieces += pieced.feed(text[at:]) + pieced.end()
    content, _, calls = read_whole(whole, text)
    assert "".join(p for p in pieces if isinstance(p, str)) == content
    assert [p for p in pieces if isinstance(p, ToolCall)] == calls
    assert whole.num_malformed == pieced.num_malformed


class Template:
    """Writes a call of `expr` in the form `call`."""

    response_template = None

    def __init__(self, call: str) -> None:
        self.call = call

    def render(self, messages: Any, tools: Any, *, add_generation_prompt: bool) -> str:
        (call,) = messages[-1]["tool_calls"]
        return self.call.replace("ARGS", call["function"]["arguments"]["expr"])


@pytest.mark.parametrize(
    ("call", "parser"),
    [
        ("<tool_call>{ARGS}</tool_call>", HermesParser),
        ('{"name": "calc", "parameters": {"expr": "ARGS"}}', LlamaParser),
        ("?[ARGS]<eos>", BracketParser),
        ("ARGS", NoParser),
    ],
)
def test_auto_looks_at_how_the_template_writes_a_call(call: str, parser: type) -> None:
    assert type(parser_for("auto", Template(call))) is parser


def test_named_parsers_are_taken_by_name_and_unknown_ones_refused() -> None:
    for name, parser in (("hermes", HermesParser), ("bracket", BracketParser), ("none", NoParser)):
        assert type(parser_for(name, Template(""))) is parser
    assert read(NoParser(), "[3*4]") == ("[3*4]", [])
    with pytest.raises(Problem, match="did you mean 'hermes'"):
        parser_for("herms", Template(""), "policies.actor.tool_parser")
