"""The gateway: agents ask for chat completions, engines give tokens, and every call is captured token by token.

Transport-independent: `app` puts it behind HTTP, a runner calls it directly. All methods run on one event loop.

    open_episode(lease) -> key        one unguessable key per episode
    chat(key, request)                prompt ids (reused or tokenised) -> engine -> Calls recorded -> reply
    stream(key, request)              the same as events, while the engine samples
    close_episode(key) -> capture     the Calls per policy; what still runs is cancelled; the key is gone
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping

import msgspec

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.calls.events import Event, Started
from astraflow.rollout.gateway.calls.retries import Retries, Retry
from astraflow.rollout.gateway.calls.run import Run
from astraflow.rollout.gateway.calls.running import Running
from astraflow.rollout.gateway.contexts import policy_of
from astraflow.rollout.gateway.dialect import ChatCompletion, ChatRequest, failure, read_request
from astraflow.rollout.gateway.dialects.responses.store import ResponseStore
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.episode import EpisodeCapture, OpenEpisode, PolicyCapture, dense
from astraflow.types import EpisodeLease

_REMEMBERED_KEYS = 4096  # closed keys that still get 410 instead of 401


class Gateway:
    """Serves the policies of one node to the agents of its episodes."""

    def __init__(self, policies: Mapping[str, PolicyEndpoint], call_timeout_s: float = 0.0) -> None:
        """`call_timeout_s`: a call that takes longer fails; 0: none does."""
        self._policies = dict(policies)
        self._episodes: dict[str, OpenEpisode] = {}
        self._running = Running(call_timeout_s)
        self._closed: deque[str] = deque(maxlen=_REMEMBERED_KEYS)

    @property
    def policies(self) -> list[str]:
        """Names that agents may use as `model`."""
        return list(self._policies)

    def stats(self) -> dict[str, float]:
        """Monotonic counters `gateway/...`, and the gauge `gateway/open_episodes`."""
        counters = {f"gateway/{name}": value for name, value in self._running.counters.items()}
        counters["gateway/open_episodes"] = float(len(self._episodes))
        return counters

    def open_episode(self, lease: EpisodeLease) -> str:
        """A new key, valid until `close_episode`. Every policy of the lease that this gateway serves can be used."""
        captures = {
            name: PolicyCapture(name, endpoint.of(lease), lease.sampling[name])
            for name, endpoint in self._policies.items()
            if name in lease.sampling
        }
        key = f"af-{secrets.token_urlsafe(24)}"
        self._episodes[key] = OpenEpisode(lease, captures)
        return key

    def close_episode(self, key: str) -> EpisodeCapture:
        """End an episode: cancel what runs, give what finished. The key gets 410 from now on.

        Of a stream that runs, an agent has what was sampled until now, so that is captured.
        Raises: GatewayError: the key is unknown or already closed.
        """
        episode = self._episode(key)
        for run in tuple(episode.runs):
            self._running.cut(episode, run, closed_error())
        del self._episodes[key]
        self._closed.append(key)
        calls = {name: dense(capture.calls) for name, capture in episode.captures.items()}
        return EpisodeCapture(episode.lease, calls)

    def check_key(self, key: str) -> None:
        """Raise GatewayError (401, or 410 after the episode) unless `key` belongs to an open episode."""
        self._episode(key)

    def idle_s(self, key: str) -> float:
        """Since when the open episode has made no call; 0 while it makes one."""
        episode = self._episode(key)
        return 0.0 if episode.runs else time.monotonic() - episode.called

    def max_context(self, policy: str) -> int:
        """Longest prompt plus reply of a policy in tokens; 0: there is no such policy."""
        endpoint = self._policies.get(policy_of(policy))
        return 0 if endpoint is None else endpoint.max_context

    def prompt_tokens(self, key: str, request: ChatRequest) -> int:
        """How many tokens the prompt of `request` has; nothing is sampled or counted. Raises: as `chat`."""
        return len(self._capture(self._episode(key), request.model).prompt(request).ids)

    def responses(self, key: str) -> ResponseStore:
        """Of the open episode. Raises: GatewayError: 401 or 410 key."""
        episode = self._episode(key)
        if episode.responses is None:
            episode.responses = ResponseStore()
        return episode.responses

    async def chat(self, key: str, request: ChatRequest, retry: Retry | None = None) -> ChatCompletion:
        """One request. `retry`: what its headers say, for requests that may be repeated.

        Raises: GatewayError: 400 bad request, 401 or 410 key, 404 policy, 499 cancelled, 503 engine, 504 deadline.
        """
        episode = self._episode(key)
        run = self._run_of(episode, request, retry)
        if run.outcome is None:
            run.readers += 1
            try:
                while run.outcome is None:
                    await run.change()
            finally:
                self._running.leave(episode, run)
        if isinstance(run.outcome, Exception):
            raise run.outcome
        return run.outcome

    async def stream(self, key: str, request: ChatRequest, retry: Retry | None = None) -> AsyncGenerator[Event, None]:
        """The same as events, see `calls.events`. Closing the generator is hanging up."""
        episode = self._episode(key)
        run = self._run_of(episode, request, retry, stream=True)
        if isinstance(run.outcome, Exception) and not run.shown:
            raise run.outcome
        run.readers += 1
        seen = 0
        try:
            while True:
                while seen < len(run.events):
                    event = run.events[seen]
                    seen += 1
                    run.shown = run.shown or not isinstance(event, Started)
                    yield event
                if isinstance(run.outcome, Exception):
                    raise run.outcome
                if run.outcome is not None:
                    return
                await run.change()
        finally:
            self._running.leave(episode, run)

    async def answer(self, key: str, body: bytes) -> tuple[int, bytes]:
        """`chat` for JSON: a status, and a completion (200) or OpenAI's error object. Does not stream."""
        try:
            return 200, msgspec.json.encode(await self.chat(key, read_request(body)))
        except AstraFlowError as error:
            return failure(error)

    def _episode(self, key: str) -> OpenEpisode:
        episode = self._episodes.get(key)
        if episode is None:
            if key in self._closed:
                raise closed_error()
            raise GatewayError(
                "api_key", "***", "is not the key of an open episode", "use llm[<policy>].api_key of this episode", 401,
                "invalid_api_key",
            )  # fmt: skip
        return episode

    def _capture(self, episode: OpenEpisode, model: str) -> PolicyCapture:
        capture = episode.captures.get(model) or episode.captures.get(policy_of(model))
        if capture is None:
            known = ", ".join(sorted(episode.captures))
            raise GatewayError(
                "model", model, "is not a policy of this episode", f"known: {known}", 404, "model_not_found"
            )  # fmt: skip
        return capture

    def _run_of(self, episode: OpenEpisode, request: ChatRequest, retry: Retry | None, *, stream: bool = False) -> Run:
        """The run that answers a request: that of an earlier try, or a new one."""
        if retry is None:
            return self._running.begin(episode, self._capture(episode, request.model), request, stream)
        if episode.retries is None:
            episode.retries = Retries()
        run = episode.retries.find(request, retry, stream=stream)
        if run is not None:
            self._running.counters["retries"] += 1
            return run
        run = self._running.begin(episode, self._capture(episode, request.model), request, stream)
        episode.retries.add(run, retry)
        return run


def closed_error() -> GatewayError:
    """What a call of a closed episode gets."""
    return GatewayError("api_key", "***", "belongs to an episode that is over", "stop calling", 410, "episode_closed")
