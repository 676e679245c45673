"""What the gateway keeps of one episode."""

from __future__ import annotations

import time

import msgspec

from astraflow.rollout.gateway.calls.retries import Retries
from astraflow.rollout.gateway.calls.run import Run
from astraflow.rollout.gateway.contexts import Contexts, Prompt, Reply, agent_of
from astraflow.rollout.gateway.dialect import ChatRequest, RawRequest
from astraflow.rollout.gateway.dialects.raw import RawContexts
from astraflow.rollout.gateway.dialects.responses.store import ResponseStore
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.types import Call, EpisodeLease, Sampling


class EpisodeCapture(msgspec.Struct):
    """What an episode's agents did: per policy the finished calls, indexed densely in order of arrival."""

    lease: EpisodeLease
    calls: dict[str, list[Call]]


class PolicyCapture:
    """One policy in one episode. Agents with a name (`model = "<policy>@<agent>"`) continue their own calls only."""

    __slots__ = ("_contexts", "_raw", "calls", "endpoint", "next_index", "policy", "sampling")

    def __init__(self, policy: str, endpoint: PolicyEndpoint, sampling: Sampling) -> None:
        self.policy, self.endpoint, self.sampling = policy, endpoint, sampling
        self._contexts: dict[str, Contexts] = {}  # by agent
        self._raw: dict[str, RawContexts] = {}
        self.calls: list[Call] = []
        self.next_index = 0

    def prompt(self, request: ChatRequest) -> Prompt:
        """Raises: GatewayError: it cannot be written."""
        agent = agent_of(request.model)
        if isinstance(request, RawRequest):
            return self._raw.setdefault(agent, RawContexts(self.endpoint)).prompt(request.prompt)
        contexts = self._contexts.get(agent)
        if contexts is None:
            contexts = self._contexts[agent] = Contexts(self.endpoint)
        return contexts.prompt(request.messages, request.tools)

    def remember(self, agent: str, prompt: Prompt, reply: Reply) -> None:
        """A finished call may be continued."""
        if prompt.node is None:
            self._raw[agent].remember(prompt, reply.sampled)
        else:
            self._contexts[agent].remember(prompt, reply)


class OpenEpisode:
    __slots__ = ("called", "captures", "lease", "responses", "retries", "runs")

    def __init__(self, lease: EpisodeLease, captures: dict[str, PolicyCapture]) -> None:
        self.lease, self.captures = lease, captures
        self.runs: list[Run] = []  # in flight
        self.responses: ResponseStore | None = None  # until one is asked for
        self.retries: Retries | None = None  # until a request comes that may be repeated
        self.called = time.monotonic()  # when the last call ended, or the episode began


def dense(calls: list[Call]) -> list[Call]:
    """Sorted by arrival; the indices of calls that never finished are closed up, so rewards per call line up."""
    calls = sorted(calls, key=lambda call: call.index)
    return [c if c.index == i else msgspec.structs.replace(c, index=i) for i, c in enumerate(calls)]
