"""Replies read by the response template of the model's own tokenizer files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import ModelError
from astraflow.rollout.gateway.dialect import ToolCall
from astraflow.rollout.gateway.parsers.template import TemplateParser
from astraflow.rollout.gateway.tools import Opening, Piece, Thought, read_whole

QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>)", "content": "text"},
    },
}
XML = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
BAD = '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>'


Read = tuple[str, str, list[Any], int]


def read(template: dict[str, Any], text: str, tools: Any = TOOLS, prompt: str = PROMPT) -> Read:
    reader = TemplateParser(template).open(Opening(tools, 2, prompt))
    content, thoughts, calls = read_whole(reader, text)
    told = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls]
    return content, thoughts, told, reader.num_malformed


def test_reasoning_content_and_calls_are_told_apart() -> None:
    text = f"<think>\nhm\n</think>\n\nso{GOOD}\n{GOOD}"
    calls = [("call_2_0", "f", {"x": 1}), ("call_2_1", "f", {"x": 1})]
    assert read(QWEN, text) == ("so", "hm", calls, 0)


def test_a_thought_that_the_prompt_began_is_one() -> None:
    assert read(QWEN, "hm</think>yes", prompt=f"{PROMPT}<think>\n") == ("yes", "hm", [], 0)


def test_calls_in_xml_take_the_types_of_the_schema() -> None:
    text = "so <tool_call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>"
    assert read(XML, text) == ("so", "", [("call_2_0", "f", {"x": 7})], 0)


@pytest.mark.parametrize(
    "bad", [BAD, "<tool_call>{", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 1}</tool_call>']
)
def test_a_call_that_cannot_be_read_stays_text_and_the_calls_before_it_stand(bad: str) -> None:
    content, thoughts, calls, malformed = read(QWEN, f"<think>hm</think>so{GOOD}{bad} and")
    assert (content, thoughts, malformed) == (f"so\n{bad} and", "hm", 1)
    assert calls == [("call_2_0", "f", {"x": 1})]
    assert read(QWEN, f"so {bad}")[0] == f"so {bad}"


def test_a_call_to_a_request_without_tools_is_text() -> None:
    assert read(QWEN, f"so {GOOD}", tools=[]) == (f"so {GOOD}", "", [], 0)


def test_a_template_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="response_template"):
        TemplateParser({"fields": {}})


WORDS = [GOOD, BAD, "<think>", "</think>", "<tool", "_call>", "</tool_call>", " ", "\n", "word", "{", "<|im_end|>"]


@given(texts=st.lists(st.sampled_from(WORDS), max_size=7), cuts=st.lists(st.integers(1, 15), max_size=30))
def test_what_is_read_does_not_depend_on_how_the_text_came(texts: list[str], cuts: list[int]) -> None:
    text = "".join(texts)
    parser = TemplateParser(QWEN)
    whole, pieced = (parser.open(Opening(TOOLS, 0, PROMPT)) for _ in range(2))
    pieces: list[Piece] = []
    at = 0
    for cut in cuts:
        pieces += pieced.feed(text[at : at + cut])
        at += cut
    pieces += pieced.feed(text[at:]) + pieced.end()
    content, thoughts, calls = read_whole(whole, text)
    assert "".join(p for p in pieces if isinstance(p, str)) == content
    assert "".join(p.text for p in pieces if isinstance(p, Thought)) == thoughts
    assert [p for p in pieces if isinstance(p, ToolCall)] == calls
    assert whole.num_malformed == pieced.num_malformed
