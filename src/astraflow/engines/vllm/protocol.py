"""The endpoints of vLLM's server, as they are since 0.32. Needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out.

| what            | how                                                                                              |
|-----------------|--------------------------------------------------------------------------------------------------|
| generate        | `/inference/v1/generate`, streamed: ids in, ids and logprobs out, version spans in the last piece  |
| pause, resume   | `/pause?mode=keep`, `/resume`: requests stay where they are                                        |
| tokens sampled  | `/collective_rpc` of `inside.worker`                                                               |
| weights         | `/start_weight_update`, `/update_weights` with a path, `/finish_weight_update` with the version    |
| effective ones  | `/collective_rpc` of `inside.worker`                                                               |
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from astraflow.engines.served.server import Ask, Comparison, Piece, Span, decoded, version_of
from astraflow.errors import EngineError
from astraflow.wire.streams.web import Refused, Web

R = TypeVar("R")
_decoded = partial(decoded, "vllm", "use vLLM 0.32")
BACKEND = "astraflow"
WORKER = "astraflow.engines.vllm.inside.worker.WorkerExtension"
PROCESSOR = "astraflow.engines.vllm.inside.sampler:ToldTemperatures"
TOLD = "astraflow_logprob_temperature"
_LOOK_S, _LONG_S = 10.0, 600.0


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Failure(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Failure | None = None


class _Card(msgspec.Struct):
    max_model_len: int


class _Cards(msgspec.Struct):
    data: list[_Card]


class _About(msgspec.Struct):
    backend: str
    logprobs_mode: str
    logits_processors: list[str]
    dtype: str
    sees_weights: bool


class _Results(msgspec.Struct):
    results: list[Any]


class VllmServer:
    """One vLLM server. See `served.server.Server`."""

    counts = True

    def __init__(self, web: Web, weights: Path, dtype: str, *, recompute: bool = True) -> None:
        """`weights`: the file that it loads from; `recompute`: keys and values of running requests are made anew after
        each change of weights, else they stay, and so does the prefix cache: it is then looked into by version."""
        self._web, self._weights, self._dtype, self._recompute = web, weights, dtype, recompute
        self._caches, self._version = uuid.uuid4().hex, -1

    async def look(self) -> int:
        """Raises: EngineError: it was not started as this engine needs it."""
        try:
            abouts = await self._workers("astraflow_about", [str(self._weights)], _About, _LOOK_S)
        except Refused as error:
            raise EngineError(
                "vllm", self._web.url, f"has no worker of astraflow ({error.rule})",
                f"start it with VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 and --worker-extension-cls {WORKER}, "
                "astraflow installed in its environment",
            ) from error  # fmt: skip
        for about in abouts:
            self._check(about)
        cards = _decoded(await self._web.ask("GET", "/v1/models", within_s=_LOOK_S), _Cards)
        return min(card.max_model_len for card in cards.data)

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Raises: Refused: the server says why; Lost: it stops in the middle."""
        sampling = ask.sampling
        told = sampling.logprob_temperature
        params: dict[str, Any] = {
            "n": 1, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "seed": sampling.seed, "max_tokens": ask.max_tokens, "min_tokens": 0, "ignore_eos": True,
            "stop_token_ids": list(ask.stop_token_ids), "logprobs": 0, "detokenize": False,
            "extra_args": None if told is None or told == (sampling.temperature or 1.0) else {TOLD: told},
        }  # fmt: skip
        ids = ask.token_ids.tolist()
        body: dict[str, Any] = {
            "request_id": ask.request_id, "token_ids": ids, "sampling_params": params, "stream": True,
        }  # fmt: skip
        if not self._recompute:
            body["cache_salt"] = f"{self._caches} {self._version}"
        async with aclosing(self._web.events("/inference/v1/generate", body)) as events:
            async for event in events:
                piece = _piece(_decoded(event, _Event))
                if piece is not None:
                    yield piece

    async def pause(self) -> Mapping[str, int]:
        """Running requests keep their tokens."""
        clear = "true" if self._recompute else "false"
        await self._web.ask("POST", f"/pause?mode=keep&clear_cache={clear}", within_s=_LONG_S)
        sampled: dict[str, int] = {}
        for counts in await self._workers("astraflow_sampled", [], dict[str, int], _LONG_S):
            for name, count in counts.items():  # "generate-tokens-<our id>-<theirs>"
                own = name.removeprefix("generate-tokens-").rpartition("-")[0]
                sampled[own] = max(count, sampled.get(own, 0))
        return sampled

    async def load(self, path: Path, version: int) -> None:
        """All workers read the file."""
        await self._post("/start_weight_update", {})
        await self._post("/update_weights", {"update_info": {"path": str(path)}})
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        self._version = version

    async def resume(self) -> None:
        """Requests go on."""
        await self._post("/resume", {})

    async def label(self, version: int) -> None:
        """Only the label changes."""
        await self._post("/update_weight_version", {"new_version": str(version)})
        self._version = version

    async def compare(self, path: Path) -> Comparison:
        """All of them, by the first worker: a server of several workers cannot look at whole weights."""
        found = await self._workers("astraflow_differences", [str(path)], Comparison, _LONG_S)
        return found[0]

    async def gauges(self) -> dict[str, float]:
        """From `/metrics`, summed over its engines (kv_usage: the highest)."""
        text = (await self._web.ask("GET", "/metrics", within_s=_LOOK_S)).decode()
        names = {
            "vllm:num_requests_running": "server_running", "vllm:num_requests_waiting": "server_waiting",
            "vllm:kv_cache_usage_perc": "kv_usage",
        }  # fmt: skip
        found = dict.fromkeys(names.values(), 0.0)
        for line in text.splitlines():
            name, _, rest = line.partition("{")
            if name in names:
                value, own = float(rest.rpartition(" ")[2]), names[name]
                found[own] = max(found[own], value) if own == "kv_usage" else found[own] + value
        await self._web.ask("GET", "/health", within_s=_LOOK_S)
        return found

    def _check(self, about: _About) -> None:
        for thing, value, needed, argument in (
            ("weight transfer", about.backend, BACKEND, f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\''),
            ("logprobs mode", about.logprobs_mode, "processed_logprobs", "--logprobs-mode processed_logprobs"),
            ("dtype", about.dtype, self._dtype, f"--dtype {self._dtype}"),
        ):
            if value != needed:
                raise EngineError(f"vllm {thing}", value, f"must be {needed}", f"start the server with {argument}")
        if not any("ToldTemperatures" in each for each in about.logits_processors):
            raise EngineError(
                "vllm logits processors", about.logits_processors, "must have that of astraflow",
                f"start the server with --logits-processors {PROCESSOR}",
            )  # fmt: skip
        if not about.sees_weights:
            raise EngineError(
                "engine.share", str(self._weights.parent.parent), "is not seen by the server",
                "name a directory that node and server share: engine = { share = ... }",
            )  # fmt: skip

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        await self._web.ask("POST", path, body, within_s=_LONG_S)

    async def _workers(self, method: str, arguments: Sequence[str], kind: type[R], within_s: float) -> list[R]:
        body = {"method": method, "args": list(arguments)}
        answer = await self._web.ask("POST", "/collective_rpc", body, within_s=within_s)
        return [msgspec.convert(result, kind) for result in _decoded(answer, _Results).results]


def _piece(event: _Event) -> Piece | None:
    if event.error is not None:
        raise Refused("vllm", event.error.code, f"refused the request: {event.error.message}", "see its log")
    if not event.choices:
        return None
    choice = event.choices[0]
    ids = choice.token_ids or []
    said = (choice.logprobs.content or []) if choice.logprobs is not None else []
    if [row.token_id for row in said] != ids:
        raise EngineError("vllm logprobs", len(said), f"are not of the {len(ids)} tokens that came", "use vLLM 0.32")
    if choice.finish_reason not in (None, "stop", "length"):
        raise Refused("vllm", choice.finish_reason, "ended a request", "see its log")
    spans = choice.weight_versions
    return Piece(
        ids, [min(0.0, row.logprob) for row in said], choice.finish_reason,
        None if spans is None else [Span(version_of("vllm", span.version), span.start, span.end) for span in spans],
    )  # fmt: skip
