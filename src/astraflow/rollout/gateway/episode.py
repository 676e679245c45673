"""What the gateway keeps of one episode, and the reply it writes for one call."""

from __future__ import annotations

import asyncio
import time

import msgspec

from astraflow.rollout.gateway.contexts import Contexts, Prompt
from astraflow.rollout.gateway.dialect import (
    AssistantMessage,
    ChatCompletion,
    ChatRequest,
    Choice,
    Logprobs,
    TokenLogprob,
    ToolCall,
    Usage,
)
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.types import Call, EpisodeLease, Generation, Sampling


class EpisodeCapture(msgspec.Struct):
    """What an episode's agents did: per policy the finished calls, indexed densely in order of arrival."""

    lease: EpisodeLease
    calls: dict[str, list[Call]]


class PolicyCapture:
    """One policy in one episode."""

    __slots__ = ("calls", "contexts", "endpoint", "next_index", "policy", "sampling")

    def __init__(self, policy: str, endpoint: PolicyEndpoint, sampling: Sampling) -> None:
        self.policy, self.endpoint, self.sampling = policy, endpoint, sampling
        self.contexts = Contexts(endpoint)
        self.calls: list[Call] = []
        self.next_index = 0


class OpenEpisode:
    __slots__ = ("called", "captures", "lease", "num_calling", "running")

    def __init__(self, lease: EpisodeLease, captures: dict[str, PolicyCapture]) -> None:
        self.lease, self.captures = lease, captures
        self.running: dict[str, tuple[PolicyEndpoint, asyncio.Future[Generation]]] = {}
        self.num_calling = 0
        self.called = time.monotonic()  # when the last call ended, or the episode began


class Turn(msgspec.Struct):
    """One generation on its way to the reply."""

    request_id: str
    index: int
    generation: Generation
    text: str | None  # content before a stop string; None: no stop string occurred


def completion_of(
    request: ChatRequest, prompt: Prompt, turn: Turn, content: str, calls: list[ToolCall], endpoint: PolicyEndpoint
) -> ChatCompletion:
    generation = turn.generation
    num_prompt, num_sampled = len(prompt.ids), len(generation.token_ids)
    if calls:
        message = AssistantMessage(content=content or None, tool_calls=calls)
        choice = Choice(message=message, finish_reason="tool_calls")
    else:
        choice = Choice(message=AssistantMessage(content=content), finish_reason=generation.finish_reason)
    completion = ChatCompletion(
        id=f"chatcmpl-{turn.request_id}", created=int(time.time()), model=request.model, choices=[choice],
        usage=Usage(num_prompt, num_sampled, num_prompt + num_sampled),
    )  # fmt: skip
    if request.logprobs:
        choice.logprobs = _logprobs(endpoint, generation)
    if request.return_token_ids:
        completion.prompt_token_ids = prompt.ids.tolist()
        choice.token_ids = generation.token_ids.tolist()
    return completion


def _logprobs(endpoint: PolicyEndpoint, generation: Generation) -> Logprobs:
    rows = []
    for token_id, logprob in zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True):
        text = endpoint.chat.decode([token_id])
        rows.append(TokenLogprob(text, logprob, list(text.encode()), []))
    return Logprobs(rows)


def dense(calls: list[Call]) -> list[Call]:
    """Sorted by arrival; the indices of calls that never finished are closed up, so rewards per call line up."""
    calls = sorted(calls, key=lambda call: call.index)
    return [c if c.index == i else msgspec.structs.replace(c, index=i) for i, c in enumerate(calls)]
