"""Readers of tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from astraflow.errors import Problem
from astraflow.rollout.gateway.tools import BracketParser, HermesParser, NoParser, parser_for


def hermes(text: str) -> tuple[str, list[tuple[str, str, Any]]]:
    content, calls = HermesParser().parse(text, [{"type": "function"}], 3)
    return content, [(c.id, c.function.name, json.loads(c.function.arguments)) for c in calls]


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
    ],
)
def test_hermes_leaves_what_it_cannot_read_as_content(text: str) -> None:
    assert hermes(text) == (text, [])


def test_hermes_keeps_a_malformed_call_beside_a_good_one_as_content() -> None:
    bad = "<tool_call>{oops}</tool_call>"
    assert hermes(bad + CALL) == (bad, [("call_3_0", "f", {"x": 1})])


def test_hermes_reads_missing_and_doubly_encoded_arguments() -> None:
    assert hermes('<tool_call>{"name": "f"}</tool_call>')[1] == [("call_3_0", "f", {})]
    doubled = json.dumps({"name": "f", "arguments": json.dumps({"x": "é"})})
    assert hermes(f"<tool_call>{doubled}</tool_call>")[1] == [("call_3_0", "f", {"x": "é"})]


def test_bracket_reads_a_whole_reply_in_brackets(fakes: Any) -> None:
    content, calls = BracketParser().parse("[3*4]", [fakes.tool("calc", expr="string")], 2)
    (call,) = calls
    assert (content, call.id, call.function.name) == ("", "call_2_0", "calc")
    assert json.loads(call.function.arguments) == {"expr": "3*4"}
    assert BracketParser().parse("[any thing]", [fakes.tool("calc", expr="string")], 0)[1]


@pytest.mark.parametrize("text", ["[3*4", "3*4]", "[3*4].", " [3*4]", "[]", "[[3*4]]", "[3][4]", "12.", ""])
def test_bracket_leaves_anything_else_as_content(fakes: Any, text: str) -> None:
    assert BracketParser().parse(text, [fakes.tool("calc", expr="string")], 0) == (text, [])


def test_bracket_needs_exactly_one_tool_with_one_string_parameter(fakes: Any) -> None:
    for tools in (
        [],
        [fakes.tool("a", x="string"), fakes.tool("b", x="string")],
        [fakes.tool("a", x="integer")],
        [fakes.tool("a", x="string", y="string")],
        [fakes.tool("a")],
        [{"type": "function"}],
    ):
        assert BracketParser().parse("[3*4]", tools, 0) == ("[3*4]", [])


class Template:
    """Writes a call of `expr` in the form `call`."""

    def __init__(self, call: str) -> None:
        self.call = call

    def render(self, messages: Any, tools: Any, *, add_generation_prompt: bool) -> str:
        (call,) = messages[-1]["tool_calls"]
        return self.call.replace("ARGS", call["function"]["arguments"]["expr"])


@pytest.mark.parametrize(
    ("call", "parser"),
    [("<tool_call>{ARGS}</tool_call>", HermesParser), ("?[ARGS]<eos>", BracketParser), ("ARGS", NoParser)],
)
def test_auto_looks_at_how_the_template_writes_a_call(call: str, parser: type) -> None:
    assert type(parser_for("auto", Template(call))) is parser


def test_named_parsers_are_taken_by_name_and_unknown_ones_refused() -> None:
    for name, parser in (("hermes", HermesParser), ("bracket", BracketParser), ("none", NoParser)):
        assert type(parser_for(name, Template(""))) is parser
    assert NoParser().parse("[3*4]", [{}], 0) == ("[3*4]", [])
    with pytest.raises(Problem, match="did you mean 'hermes'"):
        parser_for("herms", Template(""), "policies.actor.tool_parser")
