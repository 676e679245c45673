"""The engine of a policy that this node does not serve: those of other nodes, the nearest first.

    submit ──► choose a place ──► ask ──► tokens, each with its version ──► done
                    ▲   nobody: wait,       │ lost: the node is gone, or its engine
                    │   at most `unserved_s`▼
                    └──────────── ask another one for the rest

An episode stays with its place while that lives, where its prompts are in the prefix cache, and with its kind of engine
in any case: what it sampled is corrected by the name of one engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from astraflow.contracts import TokenSink
from astraflow.errors import AstraFlowError, EngineError
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.neighbours.places import Neighbours, Place, kind_of
from astraflow.types import Adapter, EffectiveWeights, EpisodeLease, FinishReason, Generation, Sampling
from astraflow.wire.streams.engines import Asked, Piece
from astraflow.wire.streams.web import Lost, Refused

log = logging.getLogger("astraflow.node")
_LOSSES = 5  # of a request, until it fails
_EPISODES = 8192  # of which it is remembered who sampled them
_NOT_HERE = 404


@dataclass(slots=True)
class _Episode:
    """What is known of an attempt at an episode."""

    version: int = -1  # that it needs at least
    place: Place | None = None
    engine: str = ""  # "<engine>@<node>" that sampled it
    begun: bool = False  # it has tokens


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    future: Future[Generation]
    on_tokens: TokenSink | None
    task: asyncio.Task[None] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        if self.on_tokens is not None and piece.token_ids:
            self.on_tokens(piece.token_ids, piece.logprobs, piece.versions)
        self.reason = piece.finish_reason

    def generation(self, reason: FinishReason) -> Generation:
        return Generation(
            np.array(self.token_ids, np.int32), np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32), reason,
        )  # fmt: skip


class FarEngine:
    """Of the contract of engines, without weights of its own. All methods on the node's loop."""

    def __init__(self, policy: str, number: int, neighbours: Neighbours, unserved_s: float) -> None:
        """`number`: which of the policy's engines on a node. `unserved_s`: a call fails that waits so long."""
        self._policy, self._number, self._neighbours, self._unserved_s = policy, number, neighbours, unserved_s
        self._requests: dict[str, _Request] = {}
        self._episodes: dict[str, _Episode] = {}
        self._max_context = 0
        self.counts = {"far_requests": 0.0, "far_tokens": 0.0, "far_lost": 0.0}
        self.ended: Future[EngineError] = Future()
        self.ended.set_running_or_notify_cancel()

    async def found(self) -> None:
        """Waits until there is one. Raises: EngineError: there is none for `unserved_s`."""
        await self._choose(_Episode())
        self._max_context = min(state.max_context for state in self._neighbours.states(self._policy, self._number))

    def expect(self, lease: EpisodeLease) -> None:
        """Requests of this attempt need the versions of its lease."""
        if len(self._episodes) >= _EPISODES:
            del self._episodes[next(iter(self._episodes))]
        needs = lease.min_versions.get(self._policy, -1)
        self._episodes[f"{lease.episode_id}/{lease.attempt}"] = _Episode(needs)

    def sampled_by(self, episode_id: str, attempt: int) -> str:
        """ "<engine>@<node>" that sampled an attempt, after which it is forgotten; "": none did."""
        episode = self._episodes.pop(f"{episode_id}/{attempt}", None)
        return "" if episode is None else episode.engine

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: Sampling,
        on_tokens: TokenSink | None = None,
    ) -> Future[Generation]:
        """Queue one generation at the nearest node. It outlives the node."""
        future: Future[Generation] = Future()
        future.set_running_or_notify_cancel()
        if self.ended.done() or request_id in self._requests:
            closed = EngineError("engine", "closed", "serves no more requests", "start a new one")
            used = EngineError("request_id", request_id, "is in use", "give every request its own id")
            future.set_exception(closed if self.ended.done() else used)
            return future
        request = _Request(request_id, np.asarray(prompt_ids, np.int32), sampling, future, on_tokens)
        self._requests[request_id] = request
        self.counts["far_requests"] += 1
        request.task = asyncio.get_running_loop().create_task(self._play(request), name=f"far {request_id}")
        return future

    def cancel(self, request_id: str) -> None:
        """End a request with what it has; the node that samples it hears of it."""
        request = self._requests.get(request_id)
        if request is not None and request.task is not None:
            request.task.cancel()
            self._finish(request, "cancelled")

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Fails: each node fetches its own."""
        return self._not_here("weights", version)

    def effective_weights(self) -> Future[EffectiveWeights]:
        """Fails: each node looks at its own."""
        return self._not_here("effective_weights", self._policy)

    @property
    def version(self) -> int:
        """The newest that can be had."""
        return max((state.version for state in self._neighbours.states(self._policy, self._number)), default=-1)

    @property
    def max_context(self) -> int:
        """The shortest of those that there were at first."""
        return self._max_context

    def stats(self) -> dict[str, float]:
        """Of requests only: what is sampled is counted where it is."""
        names = ("busy_s", "sampled_tokens", "prefill_tokens", "swaps", "waiting")
        return {**dict.fromkeys(names, 0.0), "requests": self.counts["far_requests"], "running": len(self._requests)}

    def close(self) -> None:
        """Closing twice is a no-op."""
        if self.ended.done():
            return
        error = EngineError("engine", "closed", "serves no more requests", "start a new one")
        self.ended.set_result(error)
        for request in list(self._requests.values()):
            if request.task is not None:
                request.task.cancel()
            self._finish(request, error)

    async def _play(self, request: _Request) -> None:
        """One request to its end."""
        name = request.request_id.rsplit("/", 2)[0]  # without policy and call
        episode = self._episodes.get(name) or _Episode()
        losses = 0
        try:
            while request.reason is None:
                place = await self._choose(episode)
                try:
                    await self._at(place, self._ask(place, request, episode))
                except Lost as error:
                    losses += 1
                    self.counts["far_lost"] += 1
                    log.info("a request of %s is lost at %s (%s)", self._policy, place.url, error.rule)
                    self._neighbours.suspect(place)
                    if losses >= _LOSSES:
                        raise
        except AstraFlowError as error:
            self._finish(request, error)
        except Exception as error:  # whatever it is, somebody waits for the future
            log.exception("a request ends")
            self._finish(request, EngineError("request", type(error).__name__, f"ended ({error})", "see the log"))
        else:
            self._finish(request, request.reason)

    async def _choose(self, episode: _Episode) -> Place:
        """That of the episode, or the nearest. Raises: EngineError: nobody serves the policy for `unserved_s`."""
        neighbours, policy, number = self._neighbours, self._policy, self._number
        kind = kind_of(episode.engine) if episode.begun else ""
        if episode.place is not None and neighbours.fits(episode.place, policy, number, episode.version, kind):
            return episode.place
        try:
            async with asyncio.timeout(self._unserved_s):
                while True:
                    place = neighbours.nearest(policy, number, episode.version, kind)
                    if place is not None:
                        episode.place, episode.engine = place, place.engines[policy]
                        return place
                    await neighbours.change()
        except TimeoutError:
            began = f" by {kind}, which began the episode," if kind else ""
            raise EngineError(
                f"policies.{policy}", "no node", f"has served it{began} for rollout.unserved_s={self._unserved_s:g} s, "
                f"at version {max(0, episode.version)} or later",
                f"start one that does: astraflow node --serves {policy}; see docs/multi-policy.md#placement",
            ) from None  # fmt: skip

    async def _at(self, place: Place, ask: Coroutine[Any, Any, None]) -> None:
        """Raises: Lost: the place was given up meanwhile; what `ask` raises."""
        task = asyncio.get_running_loop().create_task(ask)
        place.asks[task] = self._policy
        try:
            await asyncio.wait({task})
        finally:
            del place.asks[task]
            task.cancel()
        if task.cancelled():
            raise Lost("node", place.url, "is gone", "see its log")
        task.result()

    async def _ask(self, place: Place, request: _Request, episode: _Episode) -> None:
        left = request.sampling.max_tokens - len(request.token_ids)
        if left < 1:  # lost between its last token and its end
            request.reason = "length"
            return
        asked = Asked(
            request_id=request.request_id, number=self._number,
            prompt_ids=[*request.prompt_ids.tolist(), *request.token_ids],
            sampling=msgspec.structs.replace(request.sampling, max_tokens=left), hurry=request.on_tokens is not None,
        )  # fmt: skip
        try:
            async with aclosing(_pieces(place, self._policy, asked)) as pieces:
                async for piece in pieces:
                    self.counts["far_tokens"] += len(piece.token_ids)
                    episode.begun = episode.begun or bool(piece.token_ids)
                    request.add(piece)
                    if piece.error is not None:
                        raise EngineError(
                            f"engine of {self._policy}", place.url, f"failed ({piece.error})", "see its log"
                        )
        except Refused as error:
            if error.status == _NOT_HERE:  # another node has its address now
                raise Lost("node", place.url, error.rule, "see its log") from error
            raise
        if request.reason is None:
            raise Lost("node", place.url, "ended its answer without a reason", "see its log")

    def _finish(self, request: _Request, how: FinishReason | AstraFlowError | None) -> None:
        if self._requests.pop(request.request_id, None) is None:
            return
        if isinstance(how, AstraFlowError):
            request.future.set_exception(how)
        else:
            request.future.set_result(request.generation(how or "error"))

    def _not_here(self, thing: str, value: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(EngineError(thing, value, "is not of this node", "ask the node that serves the policy"))
        return future


class FarEndpoint(PolicyEndpoint):
    """A policy as the gateway serves it, by engines of other nodes."""

    def of(self, lease: EpisodeLease) -> PolicyEndpoint:
        """By one of them, which hears what the attempt needs."""
        chosen = super().of(lease)
        assert isinstance(chosen.engine, FarEngine)
        chosen.engine.expect(lease)
        return chosen


async def _pieces(place: Place, policy: str, asked: Asked) -> AsyncGenerator[Piece, None]:
    """Raises: Lost, Refused."""
    async with aclosing(place.web.events(f"/engines/{policy}", msgspec.to_builtins(asked))) as events:
        async for event in events:
            yield msgspec.json.decode(event, type=Piece)
