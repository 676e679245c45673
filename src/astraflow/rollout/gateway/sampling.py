"""What of a request reaches the engine: the lease's sampling, limited by the agent; the rest is refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import Chat
from astraflow.types import EpisodeLease, Generation, Sampling

MAX_STOPS = 16


def refuse_unserved(request: ChatRequest) -> None:
    """Raise GatewayError (400) for options that would change the reply and are not served."""
    if request.n is not None and request.n != 1:
        raise GatewayError("n", request.n, "must be 1", "send one request per completion")
    choice = request.tool_choice
    if choice is not None and choice != "auto" and choice != "none":
        raise GatewayError("tool_choice", choice, "must be 'auto' or 'none'", "policies choose their own tool calls")
    if request.top_logprobs:
        raise GatewayError("top_logprobs", request.top_logprobs, "must be 0", "use logprobs of the sampled tokens")
    shape = request.response_format
    if shape is not None and shape.get("type", "text") != "text":
        raise GatewayError("response_format", shape, "must be {'type': 'text'}", "policies write free text")


def overrides(request: ChatRequest, base: Sampling) -> bool:
    """True when the agent asked for another temperature, top_p or top_k than the lease's (which win)."""
    return (
        (request.temperature is not None and request.temperature != base.temperature)
        or (request.top_p is not None and request.top_p != base.top_p)
        or (request.top_k is not None and request.top_k != base.top_k)
    )


def effective(
    request: ChatRequest, lease: EpisodeLease, base: Sampling, room: int, stop_ids: tuple[int, ...]
) -> Sampling:
    """The sampling of one call. `room`: tokens left in the context; `stop_ids`: single-token stop strings."""
    limit = base.max_tokens
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if asked is not None:
        if asked < 1:
            raise GatewayError("max_tokens", asked, "must be >= 1", "leave it out for the run's own limit")
        limit = min(limit, asked)
    limit = min(limit, room)
    if limit == base.max_tokens and not stop_ids and request.seed is None:
        return base
    seed = base.seed
    if request.seed is not None:
        # Siblings of one task must differ although their agent sends one fixed seed; evaluation takes it as it is.
        mixed = f"{lease.episode_id}/{lease.attempt}/{request.seed}"
        seed = xxhash.xxh32_intdigest(mixed.encode()) if lease.purpose == "train" else request.seed
    return msgspec.structs.replace(
        base, max_tokens=limit, stop_token_ids=(*base.stop_token_ids, *stop_ids), seed=seed
    )  # fmt: skip


def stop_strings(request: ChatRequest) -> tuple[str, ...]:
    """The agent's stop strings."""
    stop = request.stop
    if stop is None:
        return ()
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > MAX_STOPS or not all(texts):
        raise GatewayError("stop", stop, f"must be at most {MAX_STOPS} non-empty strings", "send fewer")
    return texts


def single_token_stops(chat: Chat, stops: Sequence[str]) -> tuple[int, ...]:
    """Ids at which the engine can stop by itself; the other stop strings are found in the finished text."""
    ids = []
    for stop in stops:
        encoded = chat.encode(stop)
        if len(encoded) == 1 and stop in chat.decode(encoded, skip_special_tokens=False):
            ids.append(int(encoded[0]))
    return tuple(ids)


def cut_at_stop(generation: Generation, chat: Chat, stops: Sequence[str]) -> tuple[Generation, str | None]:
    """Drop what was sampled after the token that completes a stop string; also the text before the stop string.

    Returns the generation as it is and None when no stop string occurs. The last kept token is sampled and trained.
    """
    ids = generation.token_ids

    def stopped(count: int) -> bool:
        text = chat.decode(ids[:count])
        return any(stop in text for stop in stops)

    if not stopped(len(ids)):
        return generation, None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle + 1, high)
    text = chat.decode(ids[:low])
    text = text[: min(text.find(stop) for stop in stops if stop in text)]
    return Generation(np.array(ids[:low]), generation.logprobs[:low], generation.versions[:low], "stop"), text
