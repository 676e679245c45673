"""OpenAI's chat completions as records: what agents send and get, over HTTP or over the worker channel.

Unknown request fields are ignored, as SDKs send many. Extras beyond OpenAI: `top_k`, `min_p`, `return_token_ids` in,
`prompt_token_ids` and `token_ids` out (the names that vLLM uses).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.types import Message

T = TypeVar("T")


class ChatRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/chat/completions. None: not given."""

    model: str  # a policy
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None  # "auto" and "none" are served
    parallel_tool_calls: bool | None = None  # False: only the first call of a reply is one
    temperature: float | None = None  # the lease's value wins, unless the run file lets agents choose
    top_p: float | None = None  # likewise
    top_k: int | None = None  # likewise
    min_p: float | None = None  # likewise
    max_tokens: int | None = None  # at most the lease's
    max_completion_tokens: int | None = None  # newer name of max_tokens
    n: int | None = None  # each choice is a call of its own
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None  # 0
    response_format: dict[str, Any] | None = None  # {"type": "text"}
    return_token_ids: bool | None = None
    presence_penalty: float | None = None  # this and the next two: the run's own sampling wins, which has none
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    modalities: list[str] | None = None  # ["text"]
    audio: Any = None  # this and all below: refused by name, see calls.options
    functions: Any = None
    function_call: Any = None
    logit_bias: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template_kwargs: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class RawRequest(ChatRequest, kw_only=True):
    """A completion of a raw prompt: no messages, no template, no tools."""

    prompt: str | list[int]  # a text, in which special tokens are read, or its ids


class FunctionCall(msgspec.Struct):
    """Name and arguments of one tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """One tool call of an assistant message."""

    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The reply. `content` is None when the reply is tool calls and nothing else."""

    role: str = "assistant"
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET  # where the template names a field for it
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    """One sampled token; `logprob` at the sampling temperature. `bytes` is None for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any]


class Logprobs(msgspec.Struct):
    """Per sampled token."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct, kw_only=True):
    """One choice of a completion."""

    index: int = 0
    message: AssistantMessage
    finish_reason: str  # "stop" | "length" | "tool_calls"
    logprobs: Logprobs | None = None
    stop_sequence: str | UnsetType = UNSET  # the stop string that was met
    token_ids: list[int] | UnsetType = UNSET  # sampled ids, when return_token_ids


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int  # Unix seconds
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET  # when return_token_ids


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of tool call number `index`."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: dict[str, str]


class Delta(msgspec.Struct, kw_only=True):
    """A piece of the reply."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one choice."""

    index: int = 0
    delta: Delta
    finish_reason: str | None = None  # set in the last chunk of a choice
    logprobs: Logprobs | None = None  # of the tokens since the chunk before


class ChatChunk(msgspec.Struct, kw_only=True):
    """One server-sent event of a streamed completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ErrorBody(msgspec.Struct):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """Body of any reply with status >= 400."""

    error: ErrorBody


_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 410: "episode_closed"}
_decode_request = msgspec.json.Decoder(ChatRequest).decode


def read_request(body: bytes) -> ChatRequest:
    """The body of POST /v1/chat/completions.

    Raises: GatewayError: not JSON, or a field of a wrong type.
    """
    return decoded(_decode_request, body, "a chat completion request", "send OpenAI's JSON")


def decoded(decode: Callable[[bytes], T], body: bytes, what: str, fix: str) -> T:
    """The body of a request. Raises: GatewayError (400): it is not `what`, or nested too deeply to be read."""
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GatewayError("body", body[:80], f"is not {what} ({error})", fix) from error


def failure(error: AstraFlowError) -> tuple[int, bytes]:
    """Status and OpenAI's error object for an error that the gateway raised."""
    if isinstance(error, GatewayError):
        status, param, code = error.status, error.thing, error.code
    else:
        status, param, code = 500, None, None
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, msgspec.json.encode(ErrorReply(ErrorBody(str(error), kind, param, code)))


def sse(chunk: ChatChunk) -> bytes:
    """One server-sent event. A stream ends with `SSE_DONE`."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
