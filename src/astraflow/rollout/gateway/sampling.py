"""What of a request reaches the engine: the lease's sampling, limited by the agent, changed by it where it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import Chat
from astraflow.types import EpisodeLease, Sampling

_CHOICES = ("temperature", "top_p", "top_k", "min_p")
_NEVER_SERVED = (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0))


def overridden(request: ChatRequest, base: Sampling, chosen: frozenset[str]) -> bool:
    """True when the agent asked for sampling other than the lease's that it may not choose (the lease's is used)."""
    for name in _CHOICES:
        wish = getattr(request, name)  # a field of the record
        if wish is not None and name not in chosen and wish != getattr(base, name):
            return True
    for name, neutral in _NEVER_SERVED:
        wish = getattr(request, name)
        if wish is not None and wish != neutral:
            return True
    return False


def effective(
    request: ChatRequest,
    lease: EpisodeLease,
    base: Sampling,
    room: int,
    stop_ids: tuple[int, ...],
    chosen: frozenset[str],
) -> Sampling:
    """The sampling of one call.

    Args: room: tokens left in the context; stop_ids: single-token stop strings; chosen: what agents may choose.
    """
    changes: dict[str, Any] = {}
    limit = min(_token_limit(request, base.max_tokens), room)
    if limit != base.max_tokens:
        changes["max_tokens"] = limit
    if stop_ids:
        changes["stop_token_ids"] = (*base.stop_token_ids, *stop_ids)
    if request.seed is not None:
        changes["seed"] = _seed(request.seed, lease)
    for name in chosen:
        wish = getattr(request, name)
        if wish is not None and wish != getattr(base, name):
            changes[name] = max(wish, 0) if name == "top_k" else wish  # -1 is "off" for some clients
    if "temperature" in changes:
        changes["logprob_temperature"] = base.temperature or 1.0  # at which the trainer scores
    return msgspec.structs.replace(base, **changes) if changes else base


def for_choice(sampling: Sampling, choice: int) -> Sampling:
    """Of choice number `choice` > 0: with one seed for all, they would be equal."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=xxhash.xxh32_intdigest(f"{sampling.seed}/{choice}".encode()))


def _token_limit(request: ChatRequest, most: int) -> int:
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if asked is None:
        return most
    if asked < 1:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise GatewayError(name, asked, "must be >= 1", "leave it out for the run's own limit")
    return min(most, asked)


def _seed(asked: int, lease: EpisodeLease) -> int:
    """Siblings of one task must differ although their agent sends one fixed seed; evaluation takes it as it is."""
    if lease.purpose != "train":
        return asked
    return xxhash.xxh32_intdigest(f"{lease.episode_id}/{lease.attempt}/{asked}".encode())


def stop_strings(request: ChatRequest) -> tuple[str, ...]:
    """The agent's stop strings."""
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def single_token_stops(chat: Chat, stops: Sequence[str]) -> tuple[int, ...]:
    """Ids at which the engine can stop by itself; the other stop strings are found in the text."""
    ids = []
    for stop in stops:
        encoded = chat.encode(stop)
        if len(encoded) == 1 and stop in chat.decode(encoded, skip_special_tokens=False):
            ids.append(int(encoded[0]))
    return tuple(ids)
