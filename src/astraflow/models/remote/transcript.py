"""A conversation as text, and back, for policies whose tokens nobody here knows: each character is a token.

A service elsewhere has its own tokenizer and chat template, and takes messages. All else of a node deals in tokens, so
such a policy has a template that can be read back: the engine gets the messages from the ids of a prompt, and what the
service says is kept with its episode like anything that was sampled.

    text = record*      record = header (JSON, one line), newline, body, U+001E (the EOS)

    {"tools": [...]}                      the functions that are offered
    {"role": "user", ...}     body        a message; its content is the body
    {"role": "assistant"}     body        a reply as it was sampled: content, then its calls
    {"said": {...}}                       after a reply that is more than content: the same as the agent sent it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from astraflow.errors import ModelError
from astraflow.types import Message

EOS = 0x1E
EOS_TEXT = chr(EOS)
VOCAB_SIZE = 0x110000
_OPEN, _CLOSE = "<tool_call>\n", "\n</tool_call>"  # as Hermes writes them
_GONE = "�"
_REPLY = '{"role":"assistant"}\n'


class Asked(NamedTuple):
    """What a service is asked."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class Transcript:
    """Stands where a `models.chat.ChatTokenizer` does."""

    eos_ids: Sequence[int] = (EOS,)
    vocab_size = VOCAB_SIZE
    response_template: dict[str, Any] | None = None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The text of a conversation."""
        text = _record({"tools": list(tools)}) if tools else ""
        for message in messages:
            text += "".join(_records(message))
        return text + _REPLY if add_generation_prompt else text

    def encode(self, text: str) -> np.ndarray:
        """[T] int32: its characters. Halves of surrogate pairs are none."""
        whole = text.encode("utf-32-le", "surrogatepass")
        ids = np.frombuffer(whole, "<i4").astype(np.int32)
        ids[(ids >= 0xD800) & (ids < 0xE000)] = ord(_GONE)
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Its text; the EOS is left out unless asked for."""
        text = np.asarray(ids, "<i4").tobytes().decode("utf-32-le", "replace")
        return text.replace(EOS_TEXT, "") if skip_special_tokens else text


def read(text: str) -> Asked:
    """Inverse of `render` with a generation prompt. Raises: ModelError: it is the text of no conversation."""
    if not text.endswith(_REPLY):
        raise ModelError("prompt", text[:40], "is no conversation", "send messages: this policy takes no raw prompts")
    *records, _ = text.split(EOS_TEXT)
    asked = Asked([], [])
    try:
        for record in records:
            head, _, body = record.partition("\n")
            header = msgspec.json.decode(head, type=dict[str, Any])
            if "tools" in header:
                asked.tools.extend(header["tools"])
            elif "said" in header:
                asked.messages[-1] = header["said"]
            else:
                asked.messages.append({**header, "content": body})
    except (msgspec.DecodeError, IndexError) as error:
        raise ModelError("prompt", text[:40], f"is no conversation ({error})", "send messages") from error
    return asked


def spoken(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    """A reply as tokens say it. `calls`: (name, arguments as a value, or as a text that is no JSON)."""
    content = content.replace(EOS_TEXT, _GONE)
    if not calls:
        return content
    blocks = [
        _OPEN + msgspec.json.encode({"name": name, "arguments": arguments}).decode() + _CLOSE
        for name, arguments in calls
    ]  # fmt: skip
    return "\n".join([content.rstrip(), *blocks] if content.strip() else blocks)


def _records(message: Message) -> Iterator[str]:
    content = message.get("content") or ""
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    if message.get("role") != "assistant":
        yield _record({"role": message.get("role"), **rest}, content)
        return
    calls = message.get("tool_calls") or []
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    yield f"{_REPLY}{spoken(content, named)}{EOS_TEXT}"
    if rest:
        yield _record({"said": _as_sent(message)})


def _as_sent(message: Message) -> Message:
    """With arguments as JSON text, which services expect."""
    sent = dict(message)
    if "tool_calls" in message:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return sent


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _record(header: Mapping[str, Any], body: str = "") -> str:
    return f"{msgspec.json.encode(header).decode()}\n{body.replace(EOS_TEXT, _GONE)}{EOS_TEXT}"
