"""`llm["actor"]` as a workflow sees it: an OpenAI-compatible client that speaks over the worker's channel.

`await llm["actor"].chat(messages, tools=...)` gives a `Reply`; `await llm["actor"].chat.completions.create(...)` gives
what an AsyncOpenAI client gives. The request is the very JSON that goes over HTTP, so both reach the same function of
the gateway. Streaming, and agents with a client of their own, use `base_url` and `api_key`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from astraflow.errors import EpisodeError
from astraflow.types import Message

T = TypeVar("T")
Ask = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""Sends the JSON of one request to the gateway; gives status and JSON."""


_KINDS = {"context_length_exceeded": "overlong", "call_timeout": "call_timeout"}


class CallError(EpisodeError):
    """The gateway refused or failed a call. `kind`: overlong, call_timeout, engine, gateway; `status` as over HTTP."""

    def __init__(self, kind: str, status: int, message: str, code: str | None = None) -> None:
        self.kind, self.status, self.code = kind, status, code
        super().__init__(f"{kind}: {message}")


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool, as the policy asked for it."""

    id: str
    name: str
    arguments: dict[str, Any]  # empty when the policy wrote something else than a JSON object, see `text`
    text: str  # the arguments as written


class Reply:
    """One answer of a policy. `str(reply)` is its text."""

    __slots__ = ("content", "finish_reason", "message", "tool_calls", "usage")

    def __init__(self, message: Message, finish_reason: str, usage: dict[str, Any]) -> None:
        self.message = message  # append it to the messages of the next call
        self.content: str = message.get("content") or ""
        self.tool_calls = [_tool_call(c) for c in message.get("tool_calls") or ()]
        self.finish_reason = finish_reason
        self.usage = usage

    def __str__(self) -> str:
        return self.content


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: dict[str, Any] | None = None


class OpenAIFunction(msgspec.Struct):
    """`tool_call.function` of an OpenAI client."""

    name: str
    arguments: str


class OpenAIToolCall(msgspec.Struct):
    """`message.tool_calls[i]` of an OpenAI client."""

    id: str
    function: OpenAIFunction
    type: str = "function"


class OpenAIMessage(msgspec.Struct):
    """`choice.message` of an OpenAI client."""

    role: str = "assistant"
    content: str | None = None
    tool_calls: list[OpenAIToolCall] | None = None

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        """As a plain dict, as pydantic's method of that name."""
        fields = msgspec.to_builtins(self)
        return {k: v for k, v in fields.items() if v is not None} if exclude_none else dict(fields)


class OpenAIChoice(msgspec.Struct):
    """`completion.choices[i]` of an OpenAI client."""

    message: OpenAIMessage
    finish_reason: str | None = None
    index: int = 0


class OpenAIUsage(msgspec.Struct):
    """`completion.usage` of an OpenAI client."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class OpenAICompletion(msgspec.Struct):
    """What `chat.completions.create` of an OpenAI client gives."""

    choices: list[OpenAIChoice]
    id: str = ""
    model: str = ""
    created: int = 0
    object: str = "chat.completion"
    usage: OpenAIUsage | None = None


_encode = msgspec.json.Encoder().encode
_decode_reply = msgspec.json.Decoder(_Completion).decode
_decode_openai = msgspec.json.Decoder(OpenAICompletion).decode
_decode_arguments = msgspec.json.Decoder(dict[str, Any]).decode


class Chat:
    """Call it for a `Reply`, or use `.completions.create` as with AsyncOpenAI."""

    __slots__ = ("_ask", "_policy")

    def __init__(self, policy: str, ask: Ask) -> None:
        self._policy, self._ask = policy, ask

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Reply:
        completion = _decode_reply(await self._send(messages, options))
        choice = completion.choices[0]
        return Reply(choice.message, choice.finish_reason or "stop", completion.usage or {})

    @property
    def completions(self) -> Completions:
        return Completions(self)

    async def _send(self, messages: Sequence[Message], options: dict[str, Any]) -> bytes:
        if options.get("stream"):
            raise CallError("gateway", 400, "stream=true works over HTTP only; use base_url and api_key")
        status, body = await self._ask(_encode({"model": self._policy, "messages": messages, **options}))
        if status != 200:
            raise _failure(status, body)
        return body


class Completions:
    """The part of AsyncOpenAI that agents use."""

    __slots__ = ("_chat",)

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def create(
        self, *, messages: Sequence[Message], model: str | None = None, **options: Any
    ) -> OpenAICompletion:
        """`model` is the policy of this client whatever is given, but for an agent's name behind it ("actor@planner");
        options as in OpenAI's chat completions."""
        if agent := (model or "").partition("@")[2]:
            options["model"] = f"{self._chat._policy}@{agent}"
        return _decode_openai(await self._chat._send(messages, options))


class LLM:
    """One policy, bound to one episode."""

    __slots__ = ("api_key", "base_url", "chat")

    def __init__(self, policy: str, ask: Ask, base_url: str, api_key: str) -> None:
        self.chat = Chat(policy, ask)
        self.base_url, self.api_key = base_url, api_key


class Policies(dict[str, T]):
    """`llm` of a workflow: policy -> its client."""

    def __missing__(self, policy: str) -> T:
        raise EpisodeError(
            f"workflow: llm[{policy!r}] is not a policy of this run; known: {', '.join(sorted(self))}; declare "
            f"[policies.{policy}]"
        )


class BlockingLLM:
    """The same for workflows that are plain functions and run in a thread: `chat(...)` blocks and gives the Reply."""

    __slots__ = ("_llm", "_loop", "api_key", "base_url")

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop
        self.base_url, self.api_key = llm.base_url, llm.api_key

    def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """One call; options as in OpenAI's chat completions."""
        return asyncio.run_coroutine_threadsafe(self._llm.chat(messages, **options), self._loop).result()


def _tool_call(call: dict[str, Any]) -> ToolCall:
    text = call["function"]["arguments"]
    try:
        arguments = _decode_arguments(text)
    except msgspec.DecodeError:
        arguments = {}
    return ToolCall(call["id"], call["function"]["name"], arguments, text)


def _failure(status: int, body: bytes) -> CallError:
    """From an OpenAI error object `{"error": {"message", "code"}}`."""
    try:
        error = msgspec.json.decode(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (msgspec.DecodeError, KeyError, TypeError):
        return CallError("gateway", status, f"status {status}: {body[:200]!r}")
    if code in _KINDS:
        return CallError(_KINDS[code], status, message, code)
    return CallError("engine" if status >= 500 else "gateway", status, message, code)
