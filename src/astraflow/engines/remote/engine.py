"""A model that another service serves: a helper or a judge that is never trained.

    submit ──► ids to messages ──► kept verdict? ──► budget ──► service ──► text to ids ──► done
                                       └── or one that is on its way ───────┘

The policy's tokens are characters (`models.remote.transcript`), so everything else of a node deals with it as with any
policy: what it said is kept with its episode. Its logprobs are not known and are 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from astraflow.config.env import checked_token, secret_from_env, user_path
from astraflow.contracts import TokenSink
from astraflow.engines.looped.engine import LoopEngine
from astraflow.engines.remote.answers import Answers, Kept
from astraflow.engines.remote.budget import Budget, Limits, Spent
from astraflow.engines.remote.service import BadKey, Patience, Service
from astraflow.engines.remote.verdicts import Verdict, Verdicts
from astraflow.engines.requests import GREEDY_BELOW, check_sampling, checked_prompt, require
from astraflow.errors import EngineError, ModelError
from astraflow.models.remote.transcript import EOS, VOCAB_SIZE, Asked, Transcript, read, spoken
from astraflow.types import Adapter, EffectiveWeights, FinishReason, Generation, Sampling

log = logging.getLogger(__name__)
_VERSION = 0  # the only one


@dataclass(eq=False)
class _Request:
    request_id: str
    prompt_ids: np.ndarray  # [P] int32
    sampling: Sampling
    future: Future[Generation]
    on_tokens: TokenSink | None
    task: asyncio.Task[None] | None = None

    @property
    def episode(self) -> str:
        """A gateway names requests `<episode>/<attempt>/<policy>/<call>`."""
        return self.request_id.rsplit("/", 2)[0]

    def generation(self, reason: FinishReason) -> Generation:
        """It comes whole or not at all."""
        return _generation([], reason)


class RemoteEngine(LoopEngine[_Request]):
    """Any service that speaks OpenAI's chat completions.

    Args: model_dir: the model's name at the service; url: its base, up to and with /v1; key_env: the variable with its
    key, key_file: or a file with it, neither: it needs none; deadline_s: of a verdict, all tries and pauses; timeout_s:
    of a try; retries: tries after the first; concurrency: tries at once; node_requests, node_tokens, episode_requests,
    episode_tokens: most that a life of this node, or one attempt at an episode, may ask for, 0: no limit; cache: which
    verdicts are kept: those at temperature 0, all, none; cache_dir: "" keeps them in memory; cache_entries: at most;
    extra: further fields of each request; omit: fields that the service does not take; tokens_field: how it calls the
    limit of new tokens; max_context: characters of a conversation.
    Raises: EngineError: an option is out of its range, or there is no key.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        url: str,
        key_env: str = "",
        key_file: str = "",
        deadline_s: float = 300.0,
        timeout_s: float = 120.0,
        retries: int = 5,
        concurrency: int = 16,
        node_requests: int = 0,
        node_tokens: int = 0,
        episode_requests: int = 0,
        episode_tokens: int = 0,
        cache: Kept = "greedy",
        cache_dir: str = "",
        cache_entries: int = 100_000,
        extra: dict[str, object] | None = None,
        omit: list[str] | None = None,
        tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        max_context: int = 1_000_000,
        max_concurrency: int = 64,
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        schemes = ("http://", "https://")
        require("engine.url", url, url.startswith(schemes), "must start with http:// or https://", "end it with /v1")
        for name, number, least in (
            ("deadline_s", deadline_s, 0.001), ("timeout_s", timeout_s, 0.001), ("retries", retries, 0),
            ("concurrency", concurrency, 1), ("node_requests", node_requests, 0), ("node_tokens", node_tokens, 0),
            ("episode_requests", episode_requests, 0), ("episode_tokens", episode_tokens, 0),
            ("cache_entries", cache_entries, 1), ("max_context", max_context, 2),
        ):  # fmt: skip
            require(f"engine.{name}", number, least <= number < math.inf, f"must be >= {least}", "correct it")
        url, self._model = url.rstrip("/"), str(model_dir)
        self._extra, self._omit, self._tokens_field = extra or {}, frozenset(omit or ()), tokens_field
        self._chat = Transcript()
        key = _key(key_env, key_file)
        self._budget = Budget(Limits(
            node_requests=node_requests, node_tokens=node_tokens, episode_requests=episode_requests,
            episode_tokens=episode_tokens,
        ))  # fmt: skip
        self._verdicts = Verdicts(cache_dir, cache_entries)
        patience = Patience(
            deadline_s=deadline_s, timeout_s=timeout_s, retries=retries, concurrency=min(concurrency, max_concurrency)
        )
        self._service = Service(url, key, patience)
        self._answers = Answers(url, self._service, self._budget, self._verdicts, cache)
        super().__init__("astraflow-remote", max_context)

    def _checked(
        self, request_id: str, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, future: Future[Generation],
        on_tokens: TokenSink | None,
    ) -> _Request:  # fmt: skip
        ids = checked_prompt(prompt_ids, self._max_context, VOCAB_SIZE)
        check_sampling(sampling)
        return _Request(request_id, ids, sampling, future, on_tokens)

    def load_weights(self, version: int, tensors: Mapping[str, Any], adapter: Adapter | None = None) -> Future[int]:
        """Fails: they lie elsewhere."""
        future: Future[int] = Future()
        future.set_exception(self._error or EngineError(
            "weights", version, "cannot be given to a service", "use engine = 'remote' with frozen = true only"
        ))  # fmt: skip
        return future

    def effective_weights(self) -> Future[EffectiveWeights]:
        """Not known."""
        future: Future[EffectiveWeights] = Future()
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(EffectiveWeights(_VERSION, "", ""))
        return future

    @property
    def version(self) -> int:
        """Always the same: the service decides what it serves."""
        return _VERSION

    def stats(self) -> dict[str, float]:
        """Of the contract, with 0 tokens, as nothing is sampled here; remote_tokens: as the service counts them;
        remote_known: verdicts that were known; remote_retries."""
        return {
            **self._counts, "busy_s": self._busy_s(), "swaps": 0.0, "running": float(len(self._requests)),
            "waiting": 0.0, "remote_tokens": float(self._budget.tokens),
            "remote_known": float(self._answers.num_known), "remote_retries": float(self._service.num_retries),
        }  # fmt: skip

    async def _answer(self, request: _Request) -> Generation:
        try:
            asked = read(self._chat.decode(request.prompt_ids, False))
            verdict = await self._answers.of(request.episode, self._body(asked, request.sampling))
        except ModelError as error:
            raise EngineError(error.thing, error.value, error.rule, error.fix) from error
        except EngineError as error:
            bad_key = isinstance(error, BadKey) and not self._answers.answered
            if bad_key or (isinstance(error, Spent) and error.whole):
                self._fail(error)  # it would be so for every request
            raise
        generation = self._said(verdict, request.sampling)
        ids = generation.token_ids.tolist()
        if request.on_tokens is not None and ids and request.request_id in self._requests:
            request.on_tokens(ids, [0.0] * len(ids), [_VERSION] * len(ids))
        return generation

    def _body(self, asked: Asked, sampling: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model, "messages": asked.messages, "top_p": sampling.top_p,
            "temperature": 0 if sampling.temperature < GREEDY_BELOW else sampling.temperature,
            self._tokens_field: sampling.max_tokens,
        }  # fmt: skip
        chosen = {"tools": asked.tools, "top_k": sampling.top_k, "min_p": sampling.min_p}
        body |= {name: value for name, value in chosen.items() if value}
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return {name: value for name, value in {**body, **self._extra}.items() if name not in self._omit}

    def _said(self, verdict: Verdict, sampling: Sampling) -> Generation:
        ids: list[int] = self._chat.encode(spoken(verdict.content, [_value(*call) for call in verdict.calls])).tolist()
        for place, token in enumerate(ids):
            if token in sampling.stop_token_ids:
                return _generation(ids[: place + 1], "stop")
        return _generation(ids, "length") if verdict.finish == "length" else _generation([*ids, EOS], "stop")

    async def _close(self) -> None:
        self._verdicts.close()


def _generation(ids: list[int], reason: FinishReason) -> Generation:
    return Generation(
        np.array(ids, np.int32), np.zeros(len(ids), np.float32), np.full(len(ids), _VERSION, np.int32), reason
    )


def _value(name: str, arguments: str) -> tuple[str, Any]:
    """Arguments as the tool parser will read them."""
    try:
        return name, msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return name, arguments


def _key(variable: str, file: str) -> str | None:
    """Raises: EngineError: it is not where it should be."""
    require("engine.key_file", file, not (variable and file), "cannot be with engine.key_env", "leave one of them out")
    if variable:
        key = secret_from_env(variable)
        require("engine.key_env", variable, bool(key), "is not set", "export the variable where the node starts")
        return checked_token(key or "", f"engine.key_env {variable}")
    if not file:
        return None
    try:
        key = user_path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError("engine.key_file", file, f"cannot be read ({error})", "name a file with the key") from error
    require("engine.key_file", file, bool(key.strip()), "is empty", "write the key into it")
    return checked_token(key, f"engine.key_file {file}")
