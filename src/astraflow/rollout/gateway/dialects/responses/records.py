"""What the Responses dialect gives: a response and its output items. Read by OpenAI's SDKs."""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from astraflow.rollout.gateway.dialect import TokenLogprob, Usage
from astraflow.rollout.gateway.dialects.responses.request import ResponsesRequest


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageOut(msgspec.Struct, tag_field="type", tag="message"):
    """What the policy said. `status`: "in_progress", "completed", "incomplete"."""

    id: str
    content: list[OutputText] = []
    role: str = "assistant"
    status: str = "in_progress"


class FunctionCallOut(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that the agent is to run."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item."""

    text: str = ""


class ReasoningOut(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the policy thought, where its template names a field for that."""

    id: str
    content: list[ReasoningText] = []
    summary: list[Any] = []
    status: str = "in_progress"


ItemOut = MessageOut | FunctionCallOut | ReasoningOut


class InputDetails(msgspec.Struct):
    """Nothing is billed, so nothing is told."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Thoughts are not counted apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseRecord(msgspec.Struct, kw_only=True):
    """A response. `status`: "in_progress", "completed", "incomplete", "failed" or "cancelled"."""

    id: str
    object: str = "response"
    created_at: int  # Unix seconds
    status: str = "in_progress"
    background: bool
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[ItemOut] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


def new_response(request: ResponsesRequest, completion_id: str, created: int) -> ResponseRecord:
    """The response to `request`, of which nothing is there yet."""
    shape = request.text.format if request.text is not None else None
    return ResponseRecord(
        id=f"resp_{xxhash.xxh3_128_hexdigest(completion_id.encode())}", created_at=created,
        background=bool(request.background), instructions=request.instructions,
        max_output_tokens=request.max_output_tokens, metadata=request.metadata or {}, model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id, store=request.store is not False,
        text={"format": {"type": "text"} if shape is None else msgspec.to_builtins(shape)},
        tool_choice=request.tool_choice or "auto", tools=request.tools or [],
    )  # fmt: skip


def usage_of(usage: Usage) -> ResponseUsage:
    """Under the names of this dialect."""
    return ResponseUsage(
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, InputDetails(), OutputDetails()
    )  # fmt: skip
