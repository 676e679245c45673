"""Anthropic's Messages as records, and what they mean as a chat request.

Unknown fields are ignored, as SDKs send many (`cache_control`, `metadata`, `thinking`, `service_tier`). What would
change the reply and is not served is a 400: tools that a server would run, images, a reply that is begun already.

An assistant turn goes out as text and tool_use blocks and comes back as the same chat message, so the follow-up call
finds the stored ids. Policies have no flag for failed tools: `is_error` puts "Error: " before the result.
"""

from __future__ import annotations

from typing import Any

import msgspec

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest, decoded
from astraflow.types import Message


class Block(msgspec.Struct, tag_field="type"):
    """A content block, told by its `type`."""


class Text(Block, tag="text"):
    """Plain text."""

    text: str


class ToolUse(Block, tag="tool_use"):
    """A tool call of an assistant turn."""

    id: str
    name: str
    input: dict[str, Any]


class Image(Block, tag="image"):
    """Refused."""


class Document(Block, tag="document"):
    """Refused."""


class SearchResult(Block, tag="search_result"):
    """Refused."""


class Thinking(Block, tag="thinking"):
    """Thoughts of an assistant turn; the chat template decides what becomes of them."""

    thinking: str


class RedactedThinking(Block, tag="redacted_thinking"):
    """Thoughts that nobody can read: left out."""


class ToolResult(Block, tag="tool_result"):
    """What a tool answered. None: nothing."""

    tool_use_id: str
    content: str | list[Text | Image | Document | SearchResult] | None = None
    is_error: bool | None = None


AnyBlock = Text | ToolUse | ToolResult | Thinking | RedactedThinking | Image | Document | SearchResult


class Turn(msgspec.Struct):
    """One message."""

    role: str  # "user", "assistant" or "system"
    content: str | list[AnyBlock]


class Tool(msgspec.Struct):
    """A tool that the agent runs."""

    name: str
    input_schema: dict[str, Any] | None = None  # None: a tool of the server, refused
    description: str | None = None
    type: str | None = None  # "custom"; another one names a tool of the server


class ToolChoice(msgspec.Struct):
    """Which tool must be called."""

    type: str  # "auto", "any", "tool", "none"
    name: str | None = None  # of "tool"
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct):
    """A JSON schema for the reply."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """`effort` is ignored."""

    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: str  # a policy
    messages: list[Turn]
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    container: Any = None  # refused, as are mcp_servers
    mcp_servers: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages. None: not given."""

    max_tokens: int  # at most the lease's
    stop_sequences: list[str] | None = None
    temperature: float | None = None  # as in chat completions
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


_decode_request = msgspec.json.Decoder(MessagesRequest).decode
_decode_count = msgspec.json.Decoder(CountRequest).decode


def read_messages_request(body: bytes) -> MessagesRequest:
    """The body of POST /v1/messages.

    Raises: GatewayError: not JSON, or a field of a wrong type.
    """
    return decoded(_decode_request, body, "a Messages request", "send Anthropic's JSON")


def read_count_request(body: bytes) -> CountRequest:
    """The body of POST /v1/messages/count_tokens.

    Raises: GatewayError: not JSON, or a field of a wrong type.
    """
    return decoded(_decode_count, body, "a Messages request", "send Anthropic's JSON")


def chat_request(request: CountRequest) -> ChatRequest:
    """The same request as a chat completion.

    Raises: GatewayError: content or an option that policies do not take.
    """
    for name, value in (("container", request.container), ("mcp_servers", request.mcp_servers)):
        if value:
            raise GatewayError(name, value, "is not served", "run tools in the agent")
    if request.messages and request.messages[-1].role == "assistant":
        raise GatewayError(
            f"messages[{len(request.messages) - 1}].role", "assistant", "must not be last (no prefill)",
            "end with a user message",
        )  # fmt: skip
    messages: list[Message] = []
    if request.system:
        system = request.system
        text = system if isinstance(system, str) else "\n".join(block.text for block in system)
        messages.append({"role": "system", "content": text})
    for position, turn in enumerate(request.messages):
        messages += _messages(turn, f"messages[{position}]")
    chat = ChatRequest(model=request.model, messages=messages, tools=_tools(request.tools))
    choice = request.tool_choice
    if choice is not None:
        chat.tool_choice = _tool_choice(choice)
        if choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False
    if request.output_config is not None and request.output_config.format is not None:
        chat.response_format = _response_format(request.output_config.format)
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stop, chat.stream = request.max_tokens, request.stop_sequences, request.stream
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
    return chat


def _messages(turn: Turn, where: str) -> list[Message]:
    """A turn as chat messages: each tool result is one of its own, in its place among the texts."""
    if turn.role not in ("user", "assistant", "system"):
        raise GatewayError(f"{where}.role", turn.role, "must be 'user' or 'assistant'", "use one of them")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, where)]
    messages: list[Message] = []
    texts: list[str] = []
    for position, block in enumerate(turn.content):
        at = f"{where}.content[{position}]"
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, ToolResult) and turn.role == "user":
            if texts:
                messages.append({"role": turn.role, "content": "".join(texts)})
                texts = []
            messages.append(_tool_message(block, at))
        else:
            raise _no_text(block, at, turn.role)
    if texts or not messages:
        messages.append({"role": turn.role, "content": "".join(texts)})
    return messages


def _assistant(blocks: list[AnyBlock], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for position, block in enumerate(blocks):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif not isinstance(block, RedactedThinking):
            raise _no_text(block, f"{where}.content[{position}]", "assistant")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_message(block: ToolResult, where: str) -> Message:
    content = block.content
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        texts = []
        for position, part in enumerate(content):
            if not isinstance(part, Text):
                raise _no_text(part, f"{where}.content[{position}]", "tool_result")
            texts.append(part.text)
        text = "".join(texts)
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    functions = []
    for position, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise GatewayError(
                f"tools[{position}].type", tool.type, "is a tool of the server, and there is none",
                "offer a tool of your own with name and input_schema",
            )  # fmt: skip
        if tool.input_schema is None:
            raise GatewayError(f"tools[{position}].input_schema", None, "must be a JSON schema", "describe the input")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        functions.append({"type": "function", "function": function})
    return functions or None


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def _response_format(shape: OutputFormat) -> dict[str, Any]:
    if shape.type != "json_schema":
        return {"type": shape.type}
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": shape.schema or {}}}


def _no_text(block: Block, where: str, holder: str) -> GatewayError:
    kind = block.__struct_config__.tag
    return GatewayError(
        f"{where}.type", kind, f"cannot be in a turn of {holder}", "policies read text and tool results"
    )
