"""Replies read as the model's own tokenizer files say: the `response_template` that transformers' ResponseParser knows.

It names the regions of a reply (content, reasoning, tool calls) by their delimiters, so one reader serves every family
whose tokenizer ships one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from astraflow.errors import ModelError
from astraflow.rollout.gateway.dialect import FunctionCall, ToolCall
from astraflow.rollout.gateway.tools import Content, Opening, Piece, ReplyReader, Thought, function_call

_KINDS = {"reasoning_content": "thought", "thinking": "thought", "reasoning": "thought", "tool_calls": "call"}
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What content parsers raise at what they cannot read."""


class TemplateParser:
    """Raises: ModelError: `template` is not one that transformers understands."""

    always = True

    def __init__(self, template: dict[str, Any]) -> None:
        try:
            self._template = load_response_template(template)
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(
                "response_template", template, f"cannot be used ({error})", "correct tokenizer_config.json, or set "
                "tool_parser to hermes, llama3 or none",
            ) from error  # fmt: skip

    def open(self, opening: Opening) -> ReplyReader:
        """Content, reasoning and calls; a call to a request without tools is text."""
        return TemplateReader(self._template, opening)


class _Part(msgspec.Struct):
    kind: str  # content | thought | call
    text: str
    function: FunctionCall | None = None  # of a call


class _Called(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str = {}


class _Entry(msgspec.Struct):
    function: _Called


class TemplateReader:
    """A call that cannot be read is text from its opening delimiter on, and so is all that follows it."""

    def __init__(self, template: ResponseTemplate, opening: Opening) -> None:
        self.num_malformed = 0
        self._template, self._opening = template, opening
        self._parser = self._fresh()
        self._text = ""  # so far
        self._broken = False
        self._content, self._thoughts = Content(), Content()
        self._thoughts.cut = True  # without white space before it
        self._num_calls = 0
        self._heard: dict[str, int] = {"content": 0, "thought": 0, "call": 0}  # characters of text, number of calls

    def feed(self, text: str) -> list[Piece]:
        """Content and reasoning as they come, calls when they are closed."""
        self._text += text
        if self._broken:
            return self._content.say(text)
        try:
            return self._say(self._parts(self._parser.feed(text)))
        except _UNREADABLE:
            return self._break()

    def end(self) -> list[Piece]:
        """The rest."""
        pieces: list[Piece] = []
        if not self._broken:
            try:
                pieces = self._say(self._parts(self._parser.finalize()[1]))
            except _UNREADABLE:
                pieces = self._break()
        return pieces + self._content.end()

    def _fresh(self) -> ResponseParser:
        return ResponseParser(self._template, prefix=self._opening.prompt, tools=list(self._opening.tools))

    def _parts(self, events: list[dict[str, Any]]) -> list[_Part]:
        """What events say. Raises: one of _UNREADABLE: a call that is none."""
        parts: list[_Part] = []
        for event in events:
            kind = _KINDS.get(event["field"], "content")
            if kind != "call":
                parts.append(_Part(kind, event["text"] if event["type"] == "region_chunk" else ""))
            elif not self._opening.tools:
                raise ValueError("no tools were offered")
            elif event["type"] == "region_close":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                called = [msgspec.convert(value, _Entry).function for value in values]
                parts += [_Part("call", "", function_call(one.name, one.arguments)) for one in called]
        return parts

    def _say(self, parts: list[_Part]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if part.function is not None:
                self._content.interrupt()
                self._heard["call"] += 1
                pieces.append(ToolCall(f"call_{self._opening.call_index}_{self._num_calls}", part.function))
                self._num_calls += 1
            elif part.kind == "content":
                self._heard["content"] += len(part.text)
                pieces += self._content.say(part.text)
            elif part.text:
                self._content.interrupt()
                self._heard["thought"] += len(part.text)
                pieces += [Thought(text) for text in self._thoughts.say(part.text) if isinstance(text, str)]
        return pieces

    def _break(self) -> list[Piece]:
        """What was readable and is not said yet, then the rest as text.

        An error of the parser takes the events of its whole feed with it, so the text is read once more, by characters.
        """
        self._broken = True
        self.num_malformed += bool(self._opening.tools)
        parser, known, at, start = self._fresh(), dict(self._heard), 0, 0
        fresh: list[_Part] = []
        for end, char in enumerate(self._text, 1):
            try:
                parts = self._parts(parser.feed(char))
            except _UNREADABLE:
                break
            for part in parts:
                if part.function is not None:
                    at = start = end
                elif part.text:  # stands as it is in the text, after what delimits it
                    start = max(start, self._text.rfind(part.text, at, end) + len(part.text))
                    at = start
                size = 1 if part.function is not None else len(part.text)
                old = min(known[part.kind], size)
                known[part.kind] -= old
                if old < size or not size:
                    fresh.append(_Part(part.kind, part.text[old:], part.function))
        return self._say(fresh) + self._content.say(self._text[start:])
