"""OpenAI's (legacy) Completions: a raw prompt, no chat template, no messages.

The prompt is one text, in which special tokens are read, or the ids of one. `echo` gives the prompt back before the
reply, without logprobs of it, as engines give none of prompts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import RawRequest, decoded


class CompletionRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/completions. None: not given."""

    model: str  # a policy
    prompt: str | list[int | str | list[int]]  # a text, ids, or a list of one of these
    max_tokens: int | None = None  # at most the lease's; None: the lease's (OpenAI: 16)
    n: int | None = None
    best_of: int | None = None  # n
    stop: str | list[str] | None = None
    logprobs: int | None = None  # 0 or 1: of the sampled tokens; more: of so many alternatives
    echo: bool | None = None
    suffix: str | None = None  # refused
    seed: int | None = None
    temperature: float | None = None  # as in chat completions
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None


_decode_request = msgspec.json.Decoder(CompletionRequest).decode


def read_request(body: bytes) -> CompletionRequest:
    """The body of POST /v1/completions.

    Raises: GatewayError: not JSON, or a field of a wrong type.
    """
    return decoded(_decode_request, body, "a completion request", "send OpenAI's JSON")


def raw_request(request: CompletionRequest) -> RawRequest:
    """The same request for the core.

    Raises: GatewayError: an option that policies do not take.
    """
    if request.suffix:
        raise GatewayError("suffix", request.suffix, "is not served", "put what the policy must see into the prompt")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise GatewayError("best_of", request.best_of, "must be n", "choose among n replies in the agent")
    if request.echo and request.logprobs is not None:
        raise GatewayError("echo", True, "cannot go with logprobs", "leave one out: prompts have no logprobs")
    prompt = _one(request.prompt)
    if request.echo and not isinstance(prompt, str):
        raise GatewayError("echo", True, "needs a prompt of text", "send text, or put the ids before the reply's")
    raw = RawRequest(model=request.model, messages=[], prompt=prompt)
    raw.max_tokens, raw.n, raw.stop, raw.seed = request.max_tokens, request.n, request.stop, request.seed
    raw.temperature, raw.top_p = request.temperature, request.top_p
    raw.top_k, raw.min_p = request.top_k, request.min_p
    raw.stream, raw.stream_options = request.stream, request.stream_options
    raw.return_token_ids = request.return_token_ids
    if request.logprobs is not None:
        raw.logprobs, raw.top_logprobs = True, request.logprobs if request.logprobs > 1 else None
    return raw


def _one(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    """The only prompt."""
    if isinstance(prompt, str):
        return prompt
    ids = [token for token in prompt if isinstance(token, int)]
    if len(ids) == len(prompt):
        return ids
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        return prompt[0]
    raise GatewayError("prompt", f"{len(prompt)} prompts", "must be one", "send one request per prompt")
