"""Readers of tool calls: from the text that a policy wrote to OpenAI's tool calls.

A parser never fails: what it cannot read stays content, and the environment judges what it can read. Ids are
deterministic: `call_<index of the LLM call>_<n>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from astraflow.config import rooms
from astraflow.rollout.gateway.dialect import FunctionCall, ToolCall
from astraflow.types import Message


class ToolParser(Protocol):
    """Reads the reply to a request that offered `tools`."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], call_index: int) -> tuple[str, list[ToolCall]]:
        """The content that remains, and the calls."""


class Renderer(Protocol):
    """The part of a chat tokenizer that `parser_for` looks at."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The template's text."""


class NoParser:
    """All text is content."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], call_index: int) -> tuple[str, list[ToolCall]]:
        """No calls."""
        return text, []


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several; malformed JSON stays content."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], call_index: int) -> tuple[str, list[ToolCall]]:
        """Calls in order; the text around them is the content."""
        if "<tool_call>" not in text:
            return text, []
        calls: list[ToolCall] = []
        kept: list[str] = []
        end = 0
        for block in _HERMES.finditer(text):
            function = _hermes_call(block[1])
            if function is None:
                continue
            kept.append(text[end : block.start()])
            end = block.end()
            calls.append(ToolCall(f"call_{call_index}_{len(calls)}", function))
        if not calls:
            return text, []
        kept.append(text[end:])
        return "\n".join(piece for piece in map(str.strip, kept) if piece), calls


class BracketParser:
    """`[3*4]` as the whole reply calls the only tool with its only string parameter (the tiny-char template)."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]], call_index: int) -> tuple[str, list[ToolCall]]:
        """One call or none."""
        if len(tools) != 1 or _BRACKET.fullmatch(text) is None:
            return text, []
        function = tools[0].get("function") or {}
        parameter = _only_string_parameter(function)
        if parameter is None:
            return text, []
        arguments = msgspec.json.encode({parameter: text[1:-1]}).decode()
        return "", [ToolCall(f"call_{call_index}_0", FunctionCall(str(function.get("name")), arguments))]


def parser_for(name: str, chat: Renderer, where: str = "tool_parser") -> ToolParser:
    """The parser of that name; "auto" asks the chat template to write a call and looks at how it does.

    Raises: Problem: unknown name.
    """
    if name != "auto":
        parser: ToolParser = rooms.build("tool_parsers", name, {}, where)
        return parser
    written = chat.render(_PROBE, [_PROBE_TOOL], add_generation_prompt=False)
    if "<tool_call>" in written:
        return HermesParser()
    return BracketParser() if "[1+1]" in written else NoParser()


_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_BRACKET = re.compile(r"\[[^\[\]]+\]")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "",
        "parameters": {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]},
    },
}
_PROBE: list[Message] = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0_0", "type": "function", "function": {"name": "calc", "arguments": {"expr": "1+1"}}}
        ],
    },
]


class _HermesCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str = {}


def _hermes_call(text: str) -> FunctionCall | None:
    try:
        call = msgspec.json.decode(text.strip(), type=_HermesCall)
        arguments = call.arguments
        if isinstance(arguments, str):  # written as a string inside the JSON
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return FunctionCall(call.name, msgspec.json.encode(arguments).decode())


def _only_string_parameter(function: dict[str, Any]) -> str | None:
    properties = (function.get("parameters") or {}).get("properties") or {}
    if len(properties) != 1:
        return None
    name, schema = next(iter(properties.items()))
    return str(name) if schema.get("type", "string") == "string" else None
