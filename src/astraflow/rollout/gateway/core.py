"""The gateway: agents ask for chat completions, engines give tokens, and every call is captured token by token.

Transport-independent: `app` puts it behind HTTP, a runner calls it directly. All methods run on one event loop.

    open_episode(lease) -> key        one unguessable key per episode
    chat(key, request)                prompt ids (reused or tokenised) -> engine -> Call recorded -> reply
    close_episode(key) -> capture     the Calls per policy; what still runs is cancelled; the key is gone
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from astraflow.errors import AstraFlowError, EngineError, GatewayError
from astraflow.rollout.gateway.contexts import Prompt, Reply
from astraflow.rollout.gateway.dialect import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ToolCall,
    chunks,
    failure,
    read_request,
)
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.episode import (
    EpisodeCapture,
    OpenEpisode,
    PolicyCapture,
    Turn,
    completion_of,
    dense,
)
from astraflow.rollout.gateway.messages import assistant_key
from astraflow.rollout.gateway.sampling import (
    cut_at_stop,
    effective,
    overrides,
    refuse_unserved,
    single_token_stops,
    stop_strings,
)
from astraflow.rollout.gateway.tools import Opening, read_whole
from astraflow.types import Call, EpisodeLease, Generation, Sampling

MAX_CALLS = 32767  # of one policy in one episode: call_index travels as int16
_REMEMBERED_KEYS = 4096  # closed keys that still get 410 instead of 401


class Gateway:
    """Serves the policies of one node to the agents of its episodes."""

    def __init__(self, policies: Mapping[str, PolicyEndpoint], call_timeout_s: float = 0.0) -> None:
        """`call_timeout_s`: a call that takes longer fails; 0: none does."""
        self._policies, self._call_timeout_s = dict(policies), call_timeout_s
        self._episodes: dict[str, OpenEpisode] = {}
        self._wakeups = _Wakeups()
        self._closed: deque[str] = deque(maxlen=_REMEMBERED_KEYS)
        self._counters = dict.fromkeys(
            (
                "calls", "cancelled", "engine_failures", "forks", "overlong", "sampling_overridden", "prompt_tokens",
                "encoded_tokens", "sampled_tokens",
            ),
            0.0,
        )  # fmt: skip

    @property
    def policies(self) -> list[str]:
        """Names that agents may use as `model`."""
        return list(self._policies)

    def stats(self) -> dict[str, float]:
        """Monotonic counters `gateway/...`, and the gauge `gateway/open_episodes`."""
        counters = {f"gateway/{name}": value for name, value in self._counters.items()}
        counters["gateway/open_episodes"] = float(len(self._episodes))
        return counters

    def open_episode(self, lease: EpisodeLease) -> str:
        """A new key, valid until `close_episode`. Every policy of the lease that this gateway serves can be used."""
        captures = {
            name: PolicyCapture(name, endpoint, lease.sampling[name])
            for name, endpoint in self._policies.items()
            if name in lease.sampling
        }
        key = f"af-{secrets.token_urlsafe(24)}"
        self._episodes[key] = OpenEpisode(lease, captures)
        return key

    def close_episode(self, key: str) -> EpisodeCapture:
        """End an episode: cancel what runs, give what finished. The key gets 410 from now on.

        Raises: GatewayError: the key is unknown or already closed.
        """
        episode = self._episode(key)
        del self._episodes[key]
        self._closed.append(key)
        for request_id, (endpoint, waiter) in episode.running.items():
            endpoint.engine.cancel(request_id)
            if not waiter.done():
                waiter.set_exception(_closed_error())
            self._count_cancelled()
        episode.running.clear()
        calls = {name: dense(capture.calls) for name, capture in episode.captures.items()}
        return EpisodeCapture(episode.lease, calls)

    def idle_s(self, key: str) -> float:
        """Since when the open episode has made no call; 0 while it makes one."""
        episode = self._episode(key)
        return 0.0 if episode.num_calling else time.monotonic() - episode.called

    @asynccontextmanager
    async def _calling(self, key: str) -> AsyncIterator[OpenEpisode]:
        """Around each call, of any dialect: its deadline, and the time without a call that begins with its end."""
        episode = self._episode(key)
        episode.num_calling += 1
        try:
            async with asyncio.timeout(self._call_timeout_s or None) as limit:
                yield episode
        except TimeoutError:
            if not limit.expired():
                raise
            raise GatewayError(
                "call", f"{self._call_timeout_s:.3g} s", "is all that a call may take",
                "ask for fewer tokens, or raise workflow.call_timeout_s", 504, "call_timeout",
            ) from None  # fmt: skip
        finally:
            episode.num_calling -= 1
            episode.called = time.monotonic()

    def check_key(self, key: str) -> None:
        """Raise GatewayError (401, or 410 after the episode) unless `key` belongs to an open episode."""
        self._episode(key)

    async def chat(self, key: str, request: ChatRequest) -> ChatCompletion:
        """One call.

        Raises: GatewayError: 400 bad request, 401 or 410 key, 404 policy, 499 cancelled, 503 engine, 504 deadline.
        """
        async with self._calling(key) as episode:
            return await self._chat(key, episode, request)

    async def _chat(self, key: str, episode: OpenEpisode, request: ChatRequest) -> ChatCompletion:
        capture = self._capture(episode, request.model)
        refuse_unserved(request)
        stops = stop_strings(request)
        prompt = capture.contexts.prompt(request.messages, request.tools)
        sampling = self._admit(episode, capture, request, prompt, stops)
        index = capture.next_index
        capture.next_index += 1
        request_id = f"{episode.lease.episode_id}/{episode.lease.attempt}/{capture.policy}/{index}"
        generation = await self._generate(episode, capture.endpoint, request_id, prompt.ids, sampling)
        if key not in self._episodes:
            raise _closed_error()
        text: str | None = None
        if stops:
            generation, text = cut_at_stop(generation, capture.endpoint.chat, stops)
        return self._finish(capture, request, prompt, Turn(request_id, index, generation, text))

    async def answer(self, key: str, body: bytes) -> tuple[int, bytes]:
        """`chat` for JSON: a status, and a completion (200) or OpenAI's error object. Does not stream."""
        try:
            return 200, msgspec.json.encode(await self.chat(key, read_request(body)))
        except AstraFlowError as error:
            return failure(error)

    async def stream(self, key: str, request: ChatRequest) -> AsyncIterator[ChatChunk]:
        """The same call as OpenAI's stream of chunks. Engines give whole turns, so the pieces come at the end."""
        completion = await self.chat(key, request)
        for chunk in chunks(completion, include_usage=bool((request.stream_options or {}).get("include_usage"))):
            yield chunk

    def _episode(self, key: str) -> OpenEpisode:
        episode = self._episodes.get(key)
        if episode is None:
            if key in self._closed:
                raise _closed_error()
            raise GatewayError(
                "api_key", "***", "is not the key of an open episode", "use llm[<policy>].api_key of this episode", 401,
                "invalid_api_key",
            )  # fmt: skip
        return episode

    def _capture(self, episode: OpenEpisode, policy: str) -> PolicyCapture:
        capture = episode.captures.get(policy)
        if capture is None:
            known = ", ".join(sorted(episode.captures))
            raise GatewayError(
                "model", policy, "is not a policy of this episode", f"known: {known}", 404, "model_not_found"
            )  # fmt: skip
        return capture

    def _admit(
        self, episode: OpenEpisode, capture: PolicyCapture, request: ChatRequest, prompt: Prompt, stops: tuple[str, ...]
    ) -> Sampling:
        """The sampling of a call that may run; counts it."""
        endpoint, length = capture.endpoint, len(prompt.ids)
        room = endpoint.max_context - length
        if room < 1:
            self._counters["overlong"] += 1
            raise GatewayError(
                "prompt_tokens", length,
                f"must be below the maximum context length of {endpoint.max_context} tokens (policy '{request.model}')",
                "shorten the messages or the tools", 400, "context_length_exceeded",
            )  # fmt: skip
        if capture.next_index >= MAX_CALLS:
            raise GatewayError("calls", capture.next_index, f"must be <= {MAX_CALLS} in one episode", "end the episode")
        stop_ids = single_token_stops(endpoint.chat, stops) if stops else ()
        sampling = effective(request, episode.lease, capture.sampling, room, stop_ids)
        counters = self._counters
        counters["calls"] += 1
        counters["prompt_tokens"] += length
        counters["encoded_tokens"] += prompt.encoded
        if prompt.forked:
            counters["forks"] += 1
        if overrides(request, capture.sampling):
            counters["sampling_overridden"] += 1
        return sampling

    async def _generate(
        self, episode: OpenEpisode, endpoint: PolicyEndpoint, request_id: str, ids: np.ndarray, sampling: Sampling
    ) -> Generation:
        loop = asyncio.get_running_loop()
        try:
            future = endpoint.engine.submit(request_id, ids, sampling)
            if future.done():
                generation = future.result()
            else:
                waiter: asyncio.Future[Generation] = loop.create_future()
                episode.running[request_id] = (endpoint, waiter)
                future.add_done_callback(self._wakeups.on_done(loop, waiter))
                try:
                    generation = await waiter
                except asyncio.CancelledError:  # the agent went away
                    if request_id in episode.running:
                        endpoint.engine.cancel(request_id)
                        self._count_cancelled()
                    raise
                finally:
                    episode.running.pop(request_id, None)
        except EngineError as error:
            raise self._engine_failure(str(error)) from error
        if generation.finish_reason == "cancelled":
            self._count_cancelled()
            raise GatewayError("request", request_id, "was cancelled", "ask again if the episode goes on", 499)
        if generation.finish_reason == "error":
            raise self._engine_failure("the generation ended in an error")
        return generation

    def _count_cancelled(self) -> None:
        self._counters["cancelled"] += 1

    def _engine_failure(self, reason: str) -> GatewayError:
        self._counters["engine_failures"] += 1
        return GatewayError(
            "engine", reason, "could not serve the request", "see the log of the node", 503, "engine_unavailable"
        )  # fmt: skip

    def _finish(self, capture: PolicyCapture, request: ChatRequest, prompt: Prompt, turn: Turn) -> ChatCompletion:
        """Record the call and its context, and write the reply."""
        endpoint, generation = capture.endpoint, turn.generation
        sampled = generation.token_ids
        last = int(sampled[-1]) if len(sampled) and generation.finish_reason == "stop" else -1
        eos_text = endpoint.eos_texts.get(last)
        hidden = eos_text is not None or last in capture.sampling.stop_token_ids
        text = turn.text if turn.text is not None else endpoint.chat.decode(sampled[:-1] if hidden else sampled)
        content = text
        calls: list[ToolCall] = []
        if request.tools and request.tool_choice != "none":
            reader = endpoint.tool_parser.open(Opening(request.tools, turn.index, prompt.text))
            content, _, calls = read_whole(reader, text)
        capture.calls.append(Call(capture.policy, turn.index, prompt.ids, generation, prompt.forked))
        reply = Reply(
            assistant_key(content, calls), sampled, text + (eos_text or ""), eos_text is not None, turn.index
        )  # fmt: skip
        capture.contexts.remember(prompt, reply)
        self._counters["sampled_tokens"] += len(sampled)
        return completion_of(request, prompt, turn, content, calls, endpoint)


def _closed_error() -> GatewayError:
    return GatewayError("api_key", "***", "belongs to an episode that is over", "stop calling", 410, "episode_closed")


class _Wakeups:
    """Carries finished generations from the engines' threads to the event loop, one wake-up for all at once."""

    def __init__(self) -> None:
        self._finished: deque[tuple[asyncio.Future[Generation], Future[Generation]]] = deque()
        self._scheduled = False

    def on_done(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Generation]) -> Callable[..., None]:
        """What to call when the engine's future is done."""

        def wake(future: Future[Generation]) -> None:  # in the engine's thread
            self._finished.append((waiter, future))
            if not self._scheduled and not loop.is_closed():
                self._scheduled = True
                loop.call_soon_threadsafe(self._settle_all)

        return wake

    def _settle_all(self) -> None:
        self._scheduled = False  # before reading, so what is added while reading is read now or wakes us again
        while self._finished:
            waiter, future = self._finished.popleft()
            if not waiter.done():
                _settle(waiter, future)


def _settle(waiter: asyncio.Future[Generation], future: Future[Generation]) -> None:
    if future.cancelled():
        waiter.set_exception(EngineError("request", "cancelled", "was dropped by the engine", "ask again"))
        return
    error = future.exception()
    if error is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(future.result())
