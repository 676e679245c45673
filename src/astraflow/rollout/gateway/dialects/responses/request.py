"""OpenAI's Responses as records, and what they mean as a chat request.

Input is a string or items. An assistant turn is one message item and its function calls, which go out as items of their
own: here they become one chat message again, so the follow-up call finds the stored ids. Unknown fields are ignored, as
SDKs send many; what would change the reply and is not served is a 400 that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest, decoded
from astraflow.types import Message

Item = dict[str, Any]
T = TypeVar("T")


class TextFormat(msgspec.Struct):
    """Shape of the reply's text: "text", "json_object" or "json_schema" with name and schema."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """`verbosity` is ignored."""

    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses. None: not given."""

    model: str  # a policy
    input: str | list[Item] | None = None
    instructions: str | None = None  # a system message of this call only
    previous_response_id: str | None = None  # its messages come first
    tools: list[dict[str, Any]] | None = None  # functions
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None  # at most the lease's
    temperature: float | None = None  # as in chat completions
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    include: list[str] | None = None  # "message.output_text.logprobs"; the rest adds nothing here
    metadata: dict[str, str] | None = None  # given back
    store: bool | None = None  # None: true
    stream: bool | None = None
    background: bool | None = None
    truncation: str | None = None  # "disabled"
    conversation: Any = None  # refused, as is prompt
    prompt: Any = None


class Part(msgspec.Struct):
    """A piece of content: input_text, output_text, text, refusal; others are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(msgspec.Struct):
    """A message of any role."""

    role: str
    content: str | list[Part]


class FunctionCallItem(msgspec.Struct):
    """A function call of an assistant turn."""

    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(msgspec.Struct):
    """What a function returned."""

    call_id: str
    output: str | list[Part]


class Thought(msgspec.Struct):
    """Text of a reasoning item."""

    text: str = ""


class ReasoningItem(msgspec.Struct):
    """Thoughts of the assistant turn that follows; encrypted ones are left out."""

    content: list[Thought] | None = None


class Reference(msgspec.Struct):
    """An item of an earlier response of this episode."""

    id: str


_decode_request = msgspec.json.Decoder(ResponsesRequest).decode


def read_request(body: bytes) -> ResponsesRequest:
    """The body of POST /v1/responses.

    Raises: GatewayError: not JSON, or a field of a wrong type.
    """
    return decoded(_decode_request, body, "a Responses request", "send OpenAI's JSON")


def chat_request(request: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    """The same request as a chat completion on `messages` (earlier ones and those of `input`).

    Raises: GatewayError: an option that policies do not take.
    """
    for name, value in (("conversation", request.conversation), ("prompt", request.prompt)):
        if value is not None:
            raise GatewayError(name, value, "is not served", "send input, and previous_response_id if it continues")
    if request.truncation not in (None, "disabled"):
        raise GatewayError("truncation", request.truncation, "must be 'disabled'", "shorten the input in the agent")
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    chat = ChatRequest(
        model=request.model, messages=messages, tools=_tools(request.tools), tool_choice=_choice(request.tool_choice)
    )
    chat.parallel_tool_calls, chat.max_completion_tokens = request.parallel_tool_calls, request.max_output_tokens
    chat.temperature, chat.top_p, chat.stream = request.temperature, request.top_p, request.stream
    if "message.output_text.logprobs" in (request.include or ()) or request.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    if request.text is not None and request.text.format is not None:
        chat.response_format = _response_format(request.text.format)
    return chat


def messages_of(given: str | list[Item] | None, stored: Callable[[str], Item | None]) -> list[Message]:
    """The chat messages that `input` stands for. `stored`: the item of an id, for item references.

    Raises: GatewayError: an item that policies do not take, or that nobody stored.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    thoughts = ""
    for position, item in enumerate(given):
        where = f"input[{position}]"
        kind = item.get("type", "message")
        if kind == "item_reference":
            item = _referred(_read(item, Reference, where).id, where, stored)
            kind = item["type"]
        if kind == "message":
            message = _add_message(messages, _read(item, MessageItem, where), where)
        elif kind == "function_call":
            message = _calling(messages)
            message.setdefault("tool_calls", []).append(_call(_read(item, FunctionCallItem, where)))
        elif kind == "function_call_output":
            output = _read(item, FunctionOutputItem, where)
            message = {"role": "tool", "tool_call_id": output.call_id, "content": _text(output.output, where)}
            messages.append(message)
        elif kind == "reasoning":
            thoughts = "\n".join(thought.text for thought in _read(item, ReasoningItem, where).content or ())
            continue
        else:
            raise GatewayError(
                f"{where}.type", kind, "is not served", "send messages, function calls and their outputs"
            )  # fmt: skip
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"] = thoughts
        thoughts = ""
    return messages


def _calling(messages: list[Message]) -> Message:
    """The assistant message that a function call belongs to: the one before it, or a new one."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1]
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[Message], item: MessageItem, where: str) -> Message:
    if item.role not in ("user", "assistant", "system", "developer"):
        raise GatewayError(f"{where}.role", item.role, "is not a role", "use user, assistant, system or developer")
    text = _text(item.content, where)
    if item.role == "assistant" and messages and messages[-1].get("tool_calls"):
        messages[-1]["content"] += text  # said after the calls of the same turn, as no output came in between
    else:
        messages.append({"role": item.role, "content": text})
    return messages[-1]


def _call(item: FunctionCallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: str | Sequence[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise GatewayError(
                f"{where}.content[{position}].type", part.type, "is not a text part", "policies read text only"
            )  # fmt: skip
        texts.append(text)
    return "".join(texts)


def _read(item: Item, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise GatewayError(where, item, f"is not an item of its type ({error})", "send OpenAI's items") from error


def _referred(item_id: str, where: str, stored: Callable[[str], Item | None]) -> Item:
    item = stored(item_id)
    if item is None:
        raise GatewayError(f"{where}.id", item_id, "is not an item of this episode", "send the item itself", 404)
    return item


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    functions = []
    for position, tool in enumerate(tools or ()):
        kind, name = tool.get("type"), tool.get("name")
        if kind != "function":
            raise GatewayError(
                f"tools[{position}].type", kind, "is not served, there are no built-in tools",
                "offer functions, which the agent runs",
            )  # fmt: skip
        if type(name) is not str or not name:
            raise GatewayError(f"tools[{position}].name", name, "must be a string", "name the function")
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        functions.append({"type": "function", "function": function})
    return functions or None


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return None if choice == "auto" else choice  # what it is anyway, with or without tools


def _response_format(shape: TextFormat) -> dict[str, Any]:
    if shape.type != "json_schema":
        return {"type": shape.type}
    return {
        "type": "json_schema",
        "json_schema": {"name": shape.name or "reply", "schema": shape.schema or {}, "strict": shape.strict},
    }
