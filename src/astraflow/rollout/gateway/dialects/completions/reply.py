"""A chat completion of a raw prompt as OpenAI's text completion, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from astraflow.rollout.gateway.calls.events import ChoiceEnded, Event, Finished, Started, Text
from astraflow.rollout.gateway.dialect import SSE_DONE, ChatCompletion, TokenLogprob, Usage


class CompletionLogprobs(msgspec.Struct):
    """Per sampled token; `text_offset` in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None  # None: no alternatives
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One reply, or a piece of it in a stream."""

    index: int
    text: str
    finish_reason: str | None = None  # "stop" | "length"; None in all but the last piece
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Reply of POST /v1/completions, and each event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def completion_of(chat: ChatCompletion, echo: str) -> Completion:
    """All choices. `echo`: what goes before each reply."""
    choices = []
    for choice in chat.choices:
        whole = CompletionChoice(index=choice.index, text=echo + (choice.message.content or ""))
        whole.finish_reason, whole.token_ids = choice.finish_reason, choice.token_ids
        if choice.logprobs is not None:
            whole.logprobs = _logprobs(choice.logprobs.content, 0)
        choices.append(whole)
    return Completion(
        id=_completion_id(chat.id), created=chat.created, model=chat.model, choices=choices, usage=chat.usage,
        prompt_token_ids=chat.prompt_token_ids,
    )  # fmt: skip


class CompletionStream:
    """Writes the events of one call as pieces of a text completion."""

    def __init__(self, echo: str, *, include_usage: bool) -> None:
        self._echo, self._include_usage = echo, include_usage
        self._offsets: list[int] = []  # per choice: characters of the tokens whose logprobs were given

    def frames(self, event: Event) -> Iterator[bytes]:
        """Server-sent events."""
        if isinstance(event, Started):
            yield b": started\n\n"  # a comment: the reply has begun, although nothing is said yet
        for piece in self._pieces(event):
            yield data_frame(msgspec.json.encode(piece))
        if isinstance(event, Finished):
            yield SSE_DONE

    def _pieces(self, event: Event) -> Iterator[Completion]:
        if isinstance(event, Started):
            self._started = event
            self._offsets = [0] * event.num_choices
            for index in range(event.num_choices if self._echo else 0):
                yield self._piece(CompletionChoice(index=index, text=self._echo))
        elif isinstance(event, Text):
            logprobs = self._logprobs(event.choice, event.logprobs)
            yield self._piece(CompletionChoice(index=event.choice, text=event.text, logprobs=logprobs))
        elif isinstance(event, ChoiceEnded):
            logprobs = self._logprobs(event.choice, event.logprobs)
            yield self._piece(
                CompletionChoice(index=event.choice, text="", finish_reason=event.finish_reason, logprobs=logprobs)
            )
        elif isinstance(event, Finished) and self._include_usage:
            piece = self._piece(None)
            piece.usage = event.completion.usage
            yield piece

    def _piece(self, choice: CompletionChoice | None) -> Completion:
        started = self._started
        return Completion(
            id=_completion_id(started.id), created=started.created, model=started.model,
            choices=[] if choice is None else [choice], usage=None if self._include_usage else UNSET,
        )  # fmt: skip

    def _logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not tokens:
            return None
        logprobs = _logprobs(tokens, self._offsets[choice])
        self._offsets[choice] = logprobs.text_offset[-1] + len(tokens[-1].token)
        return logprobs


def data_frame(body: bytes) -> bytes:
    """One server-sent event of JSON."""
    return b"data: " + body + b"\n\n"


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs:
    rows = CompletionLogprobs([], [], None, [])
    for token in tokens:
        rows.tokens.append(token.token)
        rows.token_logprobs.append(token.logprob)
        rows.text_offset.append(offset)
        offset += len(token.token)
    return rows


def _completion_id(chat_id: str) -> str:
    return f"cmpl-{chat_id.removeprefix('chatcmpl-')}"
