"""Readers of tool calls: from the text that a policy writes, while it writes it, to OpenAI's tool calls.

A reader never fails: what it cannot read stays content and is counted, and the environment judges what it can read.
Text is held back only while it may belong to a call. Ids are deterministic: `call_<index of the LLM call>_<n>`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from astraflow.config import rooms
from astraflow.rollout.gateway.dialect import FunctionCall, ToolCall
from astraflow.rollout.gateway.reading.stops import begun
from astraflow.types import Message


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


Piece = str | Thought | ToolCall
"""A piece of content, of reasoning, or a whole tool call."""


class Opening(msgspec.Struct):
    """What a reader may know of the request whose reply it reads."""

    tools: Sequence[dict[str, Any]]  # empty: none were offered, or none are wanted
    call_index: int
    prompt: str  # the text of the prompt


class ReplyReader(Protocol):
    """Reads one reply."""

    num_malformed: int  # calls that were begun and could not be read

    def feed(self, text: str) -> list[Piece]:
        """What is certain with this piece of text."""

    def end(self) -> list[Piece]:
        """The rest. The reply may have been cut."""


class ToolParser(Protocol):
    """Gives a reader for each reply. A class named by `tool_parser = "module:Class"` has these two names."""

    always: bool  # True: reads every reply, special tokens included; False: replies to requests with tools, without

    def open(self, opening: Opening) -> ReplyReader:
        """A reader of the reply to one request."""


class Renderer(Protocol):
    """The part of a chat tokenizer that `parser_for` looks at."""

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How the model's own tokenizer files say that its replies are to be read; None: they do not."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The template's text."""


def read_whole(reader: ReplyReader, text: str) -> tuple[str, str, list[ToolCall]]:
    """Content, reasoning and calls of a finished reply."""
    pieces = reader.feed(text) + reader.end()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return content, thoughts, [piece for piece in pieces if isinstance(piece, ToolCall)]


class PlainReader:
    """All text is content."""

    __slots__ = ("num_malformed",)

    def __init__(self) -> None:
        self.num_malformed = 0

    def feed(self, text: str) -> list[Piece]:
        """The text."""
        return [text] if text else []

    def end(self) -> list[Piece]:
        """Nothing is held back."""
        return []


class Content:
    """Content around calls and thoughts: without the white space between them, and on a line of its own after them."""

    __slots__ = ("_said", "_space", "cut")

    def __init__(self) -> None:
        self._said = False
        self._space = ""  # held back: it is not said if a call follows
        self.cut = False  # by a call: the text until here is complete

    def say(self, text: str) -> list[Piece]:
        """What may be given on of `text`."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        if self.cut:
            kept = ("\n" if self._said else "") + kept.lstrip()
            self.cut = False
        self._said = True
        return [kept]

    def interrupt(self) -> None:
        """A call or a thought follows."""
        self.cut = True

    def end(self) -> list[Piece]:
        """White space at the end of a text without a call is part of it."""
        return [self._space] if self._space and not self.cut else []


class HermesReader:
    """See HermesParser."""

    __slots__ = ("_call_index", "_content", "_held", "_num_calls", "num_malformed")

    def __init__(self, call_index: int) -> None:
        self._call_index, self._num_calls, self.num_malformed = call_index, 0, 0
        self._content = Content()
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """Calls when they are closed; the text around them when it cannot be the start of one."""
        self._held += text
        pieces: list[Piece] = []
        while (start := self._held.find(_OPEN)) >= 0:
            pieces += self._content.say(self._held[:start])
            self._held = self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                return pieces
            block, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            function = _hermes_call(block[len(_OPEN) : end])
            if function is None:
                self.num_malformed += 1
                pieces += self._content.say(block)
            else:
                self._content.interrupt()
                pieces.append(ToolCall(f"call_{self._call_index}_{self._num_calls}", function))
                self._num_calls += 1
        keep = len(self._held) - begun(self._held, (_OPEN,))
        if keep:
            pieces += self._content.say(self._held[:keep])
            self._held = self._held[keep:]
        return pieces

    def end(self) -> list[Piece]:
        """A call that was not closed is text."""
        self.num_malformed += self._held.startswith(_OPEN)
        return self._content.say(self._held) + self._content.end()


ReadWhole = Callable[[str], list[FunctionCall] | None]


class WholeReader:
    """Text that is a call as a whole or not at all. `may_be`: matches every start of a call; `read`: the functions that
    a whole text calls, None if it only looks like a call, empty where nothing can be called so."""

    __slots__ = ("_call_index", "_held", "_may_be", "_open", "_read", "num_malformed")

    def __init__(self, call_index: int, may_be: re.Pattern[str], read: ReadWhole) -> None:
        self._call_index, self._may_be, self._read = call_index, may_be, read
        self._held, self._open, self.num_malformed = "", True, 0

    def feed(self, text: str) -> list[Piece]:
        """Nothing while it may become a call."""
        self._held += text
        if self._open and self._may_be.fullmatch(self._held) is not None:
            return []
        self._open = False
        text, self._held = self._held, ""
        return [text] if text else []

    def end(self) -> list[Piece]:
        """The calls, or the text."""
        if not self._held:
            return []
        functions = self._read(self._held)
        if not functions:
            self.num_malformed = int(functions is None)
            return [self._held]
        return [ToolCall(f"call_{self._call_index}_{n}", function) for n, function in enumerate(functions)]


class NoParser:
    """All text is content."""

    always = False

    def open(self, opening: Opening) -> ReplyReader:
        """No calls."""
        return PlainReader()


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several; malformed JSON stays content."""

    always = False

    def open(self, opening: Opening) -> ReplyReader:
        """Calls in order; the text around them is the content."""
        return HermesReader(opening.call_index)


class LlamaParser:
    """`{"name": ..., "parameters": {...}}` as the whole reply, several with `;` between (Llama 3)."""

    always = False

    def open(self, opening: Opening) -> ReplyReader:
        """Calls or text."""
        return WholeReader(opening.call_index, _BRACE, _llama_calls)


class BracketParser:
    """`[3*4]` as the whole reply calls the only tool with its only string parameter (the tiny-char template)."""

    always = False

    def open(self, opening: Opening) -> ReplyReader:
        """One call or none."""
        return WholeReader(opening.call_index, _BRACKET, partial(_bracket_calls, opening.tools))


def parser_for(name: str, chat: Renderer, where: str = "tool_parser") -> ToolParser:
    """The parser of that name. "auto": as the tokenizer's files say; else the chat template is asked to write a call,
    to look at how it does.

    Raises: Problem: unknown name. ModelError: a response template that is none.
    """
    if name != "auto":
        parser: ToolParser = rooms.build("tool_parsers", name, {}, where)
        return parser
    if chat.response_template is not None:
        from astraflow.rollout.gateway.parsers.template import TemplateParser  # loads transformers

        return TemplateParser(chat.response_template)
    written = chat.render(_PROBE, [_PROBE_TOOL], add_generation_prompt=False)
    if _OPEN in written:
        return HermesParser()
    if _LLAMA_PROBE.search(written) is not None:
        return LlamaParser()
    return BracketParser() if "[1+1]" in written else NoParser()


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BRACKET = re.compile(r"\[[^\[\]]*\]?")
UNREADABLE = (ValueError, msgspec.DecodeError, RecursionError)
"""What reading a call raises: no JSON, not that of a call, half of a surrogate pair, nested too deeply."""


def _finite(text: str) -> float:
    """Python reads NaN and 1e999, which are no JSON numbers."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)
_BRACE = re.compile(r"\s*(\{.*)?", re.DOTALL)
_LLAMA_PROBE = re.compile(r'\{"name": "calc", "parameters": \{"expr": "1\+1"\}\}')
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


class _LlamaCall(msgspec.Struct):
    name: str
    parameters: dict[str, Any]


def function_call(name: str, arguments: dict[str, Any] | str) -> FunctionCall:
    """Arguments written as a string inside the JSON are read once more. Raises: msgspec.DecodeError: they are none."""
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments, type=dict[str, Any])
    return FunctionCall(name, msgspec.json.encode(arguments).decode())


def _hermes_call(text: str) -> FunctionCall | None:
    try:
        call = msgspec.json.decode(text.strip(), type=_HermesCall)
        return function_call(call.name, call.arguments)
    except UNREADABLE:
        return None


def _llama_calls(text: str) -> list[FunctionCall] | None:
    """Each object ends where the next one starts; a `;` inside of a string separates nothing."""
    functions, rest = [], text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
            call = msgspec.convert(value, _LlamaCall)
            functions.append(function_call(call.name, call.parameters))
        except UNREADABLE:
            return None
        rest = rest[end:].lstrip("; \n")
    return functions or None


def _bracket_calls(tools: Sequence[dict[str, Any]], text: str) -> list[FunctionCall] | None:
    function = (tools[0].get("function") or {}) if len(tools) == 1 else {}
    parameter = _only_string_parameter(function)
    if parameter is None:
        return []
    if not (len(text) > 2 and text.endswith("]")):
        return None
    return [FunctionCall(str(function.get("name")), msgspec.json.encode({parameter: text[1:-1]}).decode())]


def _only_string_parameter(function: dict[str, Any]) -> str | None:
    properties = (function.get("parameters") or {}).get("properties") or {}
    if len(properties) != 1:
        return None
    name, schema = next(iter(properties.items()))
    kind = schema.get("type", "string") if isinstance(schema, dict) else schema  # true and false are schemas too
    return str(name) if kind in ("string", True) else None
