"""Messages in two forms: a canonical key (are two messages the same?) and what the chat template gets.

Agents send history back through SDKs that re-serialise: `content: null` for "", arguments with other spaces or key
order, null fields added. Such messages have the same key. Content, tool calls and tool ids all count.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ToolCall
from astraflow.types import Message

MessageKey = Hashable

_CACHED_CHARS = 512  # longer arguments are parsed each time, so the cache stays small


def read_messages(messages: Sequence[Message]) -> tuple[list[MessageKey], list[Message]]:
    """The key of each message, and each message as the chat template gets it.

    Raises: GatewayError: a message that is none.
    """
    if not messages:
        raise GatewayError("messages", "[]", "must not be empty", "send at least one message")
    keys: list[MessageKey] = []
    plain: list[Message] = []
    for position, message in enumerate(messages):
        if len(message) == 2:
            role, content = message.get("role"), message.get("content")
            if type(role) is str and type(content) is str and role != "developer":
                keys.append((role, content))
                plain.append(message)
                continue
        key, normal = _read(message, position)
        keys.append(key)
        plain.append(normal)
    return keys, plain


def assistant_key(content: str, calls: Sequence[ToolCall], reasoning: str = "") -> MessageKey:
    """The key under which a reply of ours comes back."""
    if not calls and not reasoning:
        return ("assistant", content)
    named = tuple((c.id, c.function.name, _arguments(c.function.arguments)[0]) for c in calls)
    return ("assistant", content, "", "", reasoning, named)


def _read(message: Message, position: int) -> tuple[MessageKey, Message]:
    where = f"messages[{position}]"
    role = message.get("role")
    if type(role) is not str or not role:
        raise GatewayError(f"{where}.role", role, "must be a string", "use system, user, assistant or tool")
    if role == "developer":
        role = "system"  # newer SDKs; chat templates know only system
    content = _text(message.get("content"), where)
    tool_call_id, name = message.get("tool_call_id") or "", message.get("name") or ""
    reasoning = message.get("reasoning_content") or ""
    calls = message.get("tool_calls")
    normal: Message = {"role": role, "content": content}
    if not (calls or tool_call_id or name or reasoning):
        return (role, content), normal
    if not (type(tool_call_id) is str and type(name) is str and type(reasoning) is str):
        raise GatewayError(
            where, message, "must have strings in tool_call_id, name, reasoning_content", "fix the types"
        )
    named: tuple[Hashable, ...] = ()
    if tool_call_id:
        normal["tool_call_id"] = tool_call_id
    if name:
        normal["name"] = name
    if reasoning:
        normal["reasoning_content"] = reasoning
    if calls:
        named, normal["tool_calls"] = _calls(calls, where)
    return (role, content, tool_call_id, name, reasoning, named), normal


def _calls(calls: Any, where: str) -> tuple[tuple[Hashable, ...], list[dict[str, Any]]]:
    keys: list[Hashable] = []
    normal = []
    try:
        for call in calls:
            function = call["function"]
            name, call_id, arguments = function["name"], call.get("id") or "", function.get("arguments") or ""
            text = arguments if type(arguments) is str else msgspec.json.encode(arguments).decode()
            canonical, parsed = _arguments(text)
            keys.append((str(call_id), str(name), canonical))
            normal.append(
                {"id": call_id, "type": "function", "function": {"name": str(name), "arguments": parsed}}
            )  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:
        raise GatewayError(
            f"{where}.tool_calls", calls, "must be a list of {id, type, function: {name, arguments}}",
            "send back the tool calls as they came",
        ) from error  # fmt: skip
    return tuple(keys), normal


def _text(content: Any, where: str) -> str:
    if type(content) is str:
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if type(text) is not str:
                kind = part.get("type") if isinstance(part, dict) else part
                raise GatewayError(f"{where}.content", kind, "is not a text part", "policies read text only")
            texts.append(text)
        return "".join(texts)
    raise GatewayError(f"{where}.content", content, "must be a string, text parts or null", "send text")


def _arguments(text: str) -> tuple[str, Any]:
    """Canonical text of JSON arguments, and their value; text that is not JSON stands for itself."""
    return _parse_cached(text) if len(text) <= _CACHED_CHARS else _parse(text)


def _parse(text: str) -> tuple[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
        return msgspec.json.encode(_whole_numbers(value), order="sorted").decode(), value
    except (msgspec.DecodeError, RecursionError):  # nested too deeply is as good as no JSON
        return text, text


_parse_cached = functools.lru_cache(maxsize=1024)(_parse)


def _whole_numbers(value: Any) -> Any:
    """1.0 becomes 1: an agent in JavaScript sends it back so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return value
