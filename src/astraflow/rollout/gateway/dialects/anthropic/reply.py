"""A chat completion as Anthropic's message, its events as Anthropic's stream, and errors in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.calls.events import Event, Finished, Reasoning, Started, Text, ToolDelta
from astraflow.rollout.gateway.dialect import ChatCompletion, Choice


class TextOut(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the reply."""

    text: str


class ThinkingOut(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the policy thought, where its template names a field for that."""

    thinking: str
    signature: str = ""  # nothing is encrypted here


class ToolUseOut(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call of the reply."""

    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class Usage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int


class MessageReply(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Reply of POST /v1/messages. `stop_reason` is None while it is streamed."""

    id: str
    role: str = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: str | None = None
    stop_sequence: str | None = None  # which was met
    usage: Usage


class ErrorBody(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class ErrorReply(msgspec.Struct, tag_field="type", tag="error"):
    """Body of any reply with status >= 400, and the event that ends a stream that failed."""

    error: ErrorBody
    request_id: str


_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def message_of(completion: ChatCompletion, max_context: int) -> MessageReply:
    """The only choice as a message. `max_context`: of the policy, to tell which limit cut a reply."""
    choice, usage = completion.choices[0], completion.usage
    message = choice.message
    content: list[BlockOut] = []
    if message.reasoning_content:
        content.append(ThinkingOut(message.reasoning_content))
    if message.content:
        content.append(TextOut(message.content))
    for call in message.tool_calls or ():
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
        content.append(ToolUseOut(call.id, call.function.name, arguments))
    return MessageReply(
        id=_message_id(completion.id), model=completion.model, content=content,
        stop_reason=_stop_reason(choice, full=usage.total_tokens >= max_context),
        stop_sequence=None if choice.stop_sequence is UNSET else choice.stop_sequence,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens),
    )  # fmt: skip


class MessageStream:
    """Writes the events of one call as Anthropic's: blocks one after the other, each opened, filled and closed."""

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self._index = -1
        self._open = ""  # type of the block that is being filled; "": none

    def frames(self, event: Event) -> Iterator[bytes]:
        """Server-sent events."""
        if isinstance(event, Started):
            message = MessageReply(
                id=_message_id(event.id), model=event.model, content=[], usage=Usage(event.prompt_tokens, 0)
            )  # fmt: skip
            yield _frame("message_start", message=message)
            yield _frame("ping")
        elif isinstance(event, Text):
            if self._open != "text":
                yield from self._start("text", TextOut(""))
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, Reasoning):
            if self._open != "thinking":
                yield from self._start("thinking", ThinkingOut(""))
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, ToolDelta):
            if event.id:
                yield from self._start("tool_use", ToolUseOut(event.id, event.name, {}))
            if event.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        elif isinstance(event, Finished):
            yield from self._stop()
            whole = message_of(event.completion, self._max_context)
            delta = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
            yield _frame("message_delta", delta=delta, usage=whole.usage)
            yield _frame("message_stop")

    def _start(self, kind: str, block: BlockOut) -> Iterator[bytes]:
        yield from self._stop()
        self._index += 1
        self._open = kind
        yield _frame("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _frame("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _frame("content_block_stop", index=self._index)


def failure(error: AstraFlowError, request_id: str, max_context: int) -> tuple[int, bytes]:
    """Status and Anthropic's error object. `max_context`: of the policy, if it is known."""
    status, message = 500, str(error)
    if isinstance(error, GatewayError):
        status = error.status
        if error.code == "context_length_exceeded":  # in words that clients look for
            message = f"prompt is too long: {error.value} tokens > {max_context} maximum; {error.fix}"
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, msgspec.json.encode(ErrorReply(ErrorBody(kind, message), request_id))


def error_frame(body: bytes) -> bytes:
    """The event that ends a stream that failed after its start. `body`: of `failure`."""
    return b"event: error\ndata: " + body + b"\n\n"


def _message_id(completion_id: str) -> str:
    return f"msg_{completion_id.removeprefix('chatcmpl-')}"


def _stop_reason(choice: Choice, *, full: bool) -> str:
    if choice.finish_reason == "tool_calls":
        return "tool_use"
    if choice.finish_reason == "length":
        return "model_context_window_exceeded" if full else "max_tokens"
    return "end_turn" if choice.stop_sequence is UNSET else "stop_sequence"


def _frame(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"
