"""The endpoints of SGLang's server, as they are since 0.5.23.

| what         | how                                                                                               |
|--------------|---------------------------------------------------------------------------------------------------|
| generate     | `/generate`, streamed in disjoint pieces: ids in, ids and logprobs out, versions at the end       |
| pause        | `/pause_generation` (retract), then `/abort_request` of all: what is left is asked for again      |
| weights      | `/update_weights_from_disk` with a directory and a version; it empties the prefix cache           |
| resume       | `/continue_generation`                                                                            |
| busy         | `/v1/loads`                                                                                       |
| what it does | `/server_info`, and one token that shows which logprobs it says                                   |

It does not say how many tokens a request has sampled before the request ends, so tokens that are on their way at a
pause could be of either version. Therefore a generation ends at each pause, and is asked for again with its tokens as
its prompt. It costs what retracting costs: keys and values are made anew.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from astraflow.engines.requests import GREEDY_BELOW
from astraflow.engines.served.server import UNLABELLED, Ask, Comparison, Piece, Span, decoded, version_of
from astraflow.engines.sglang.command import check_version
from astraflow.errors import EngineError
from astraflow.wire.streams.web import Lost, Refused, Web

_decoded = partial(decoded, "sglang", "use SGLang 0.5.23")
_LOOK_S, _LONG_S = 10.0, 600.0
_FLAT = 1e6  # a temperature that makes all tokens of any model nearly equally likely
_TOLD_WITHIN = 0.1  # nats, of the logprob at `_FLAT`; half precision is off by 0.04


class _Info(msgspec.Struct):
    version: str
    dtype: str
    max_req_input_len: int  # prompts are shorter, and with their replies at most 4 longer
    incremental_streaming_output: bool
    enable_deterministic_inference: bool
    speculative_algorithm: str | None = None
    stream_interval: int = 1


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str  # stop, length, abort
    matched: Any = None  # the id that it stopped at
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_version: str = UNLABELLED
    weight_versions: list[_Span] | None = None


class _Failure(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Failure | None = None


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load]


class SglangServer:
    """One SGLang server. See `served.server.Server`."""

    counts = False

    def __init__(self, web: Web, dtype: str, vocab_size: int, seed: int, *, deterministic: bool) -> None:
        """`seed`: of requests that bring none, where the server is deterministic: it would give them all one seed."""
        self._web, self._dtype, self._vocab_size = web, dtype, vocab_size
        self._seed, self._deterministic = seed, deterministic

    async def look(self) -> int:
        """Raises: EngineError: it was not started as this engine needs it."""
        await self._post("/continue_generation", {})  # a node that died within a swap has left it paused
        info = _decoded(await self._web.ask("GET", "/server_info", within_s=_LOOK_S), _Info)
        self._check(info)
        await self._check_logprobs()
        return info.max_req_input_len

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece, None]:
        """Raises: Refused: the server says why; Lost: it stops in the middle, or was told to by somebody else."""
        body = self._body(ask)
        stops, count, ended = frozenset(ask.stop_token_ids), 0, False
        try:
            async with aclosing(self._web.events("/generate", body)) as events:
                async for event in events:
                    answer = _decoded(event, _Event)
                    meta = _said(answer)
                    ended = meta.finish_reason is not None
                    reason = _reason(meta.finish_reason, stops, ask.request_id)
                    count += len(answer.output_ids)
                    yield _piece(answer.output_ids, meta, reason, count)
        except (Lost, Refused):
            ended = True
            raise
        finally:
            if not ended:  # a closed connection alone ends it two seconds later
                with contextlib.suppress(Lost, Refused):
                    await self._web.ask("POST", "/abort_request", {"rid": ask.request_id}, within_s=_LOOK_S)

    async def pause(self) -> Mapping[str, int]:
        """Nothing runs any more, so that the prefix cache can be emptied."""
        await self._post("/pause_generation", {"mode": "retract"})
        await self._post("/abort_request", {"abort_all": True})
        return {}

    async def load(self, path: Path, version: int) -> None:
        """All workers read the directory of the file."""
        await self._post("/update_weights_from_disk", {
            "model_path": str(path.parent), "load_format": "safetensors", "weight_version": str(version),
            "flush_cache": True, "abort_all_requests": False,
        })  # fmt: skip

    async def resume(self) -> None:
        """It serves again."""
        await self._post("/continue_generation", {})

    async def label(self, version: int) -> None:
        """Only the label changes."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def compare(self, path: Path) -> Comparison:
        """It has no way to look at whole weights that is fit for more than tests."""
        return Comparison(0, unknown=("every weight",))

    async def gauges(self) -> dict[str, float]:
        """Summed over its data-parallel ranks (kv_usage: the highest)."""
        loads = _decoded(await self._web.ask("GET", "/v1/loads?include=core", within_s=_LOOK_S), _Loads).loads
        return {
            "server_running": float(sum(load.num_running_reqs for load in loads)),
            "server_waiting": float(sum(load.num_waiting_reqs for load in loads)),
            "kv_usage": max((load.token_usage for load in loads), default=0.0),
        }

    def _body(self, ask: Ask) -> dict[str, Any]:
        sampling = ask.sampling
        params: dict[str, Any] = {
            "n": 1, "temperature": 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": sampling.min_p, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": ask.max_tokens, "min_new_tokens": 0,
            # True would make it ignore stop_token_ids too
            "ignore_eos": False, "stop_token_ids": list(ask.stop_token_ids),
        }  # fmt: skip
        if self._deterministic:
            own = xxhash.xxh32_intdigest(f"{self._seed}/{ask.request_id}".encode())
            params["sampling_seed"] = own if sampling.seed is None else sampling.seed
        return {
            "rid": ask.request_id, "input_ids": ask.token_ids.tolist(), "sampling_params": params,
            "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False,
            "stream": True,
        }  # fmt: skip

    def _check(self, info: _Info) -> None:
        check_version(info.version, f"start one of these versions at {self._web.url}")
        for thing, value, needed, argument in (
            ("dtype", info.dtype, self._dtype, f"--dtype {self._dtype}"),
            ("incremental_streaming_output", info.incremental_streaming_output, True, "--incremental-streaming-output"),
            ("stream_interval", info.stream_interval, 1, "--stream-interval 1"),
            ("speculative_algorithm", info.speculative_algorithm, None, "no --speculative-algorithm"),
        ):
            if value != needed:
                raise EngineError(f"sglang {thing}", value, f"must be {needed}", f"start the server with {argument}")
        if self._deterministic and not info.enable_deterministic_inference:
            raise EngineError(
                "engine.deterministic", True, f"is not what the server at {self._web.url} does",
                "start it with --enable-deterministic-inference, or leave engine.deterministic out",
            )  # fmt: skip

    async def _check_logprobs(self) -> None:
        """The likeliest token at a temperature at which all are equally likely: its logprob is that of one in all if
        logprobs are those at the temperature and before top-k."""
        params = {
            "n": 1, "temperature": _FLAT, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 1, "min_new_tokens": 0,
            "ignore_eos": False, "stop_token_ids": [],
        }  # fmt: skip
        body = {
            "rid": uuid.uuid4().hex, "input_ids": [0], "sampling_params": params, "return_logprob": True,
            "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False, "stream": False,
        }  # fmt: skip
        answer = _decoded(await self._web.ask("POST", "/generate", body, within_s=_LONG_S), _Event)
        said = _said(answer).output_token_logprobs
        if len(said) != 1 or abs(said[0][0] + math.log(self._vocab_size)) > _TOLD_WITHIN:
            raise EngineError(
                "sglang logprobs", [row[0] for row in said],
                f"must be near {-math.log(self._vocab_size):.2f} for any token at a temperature of {_FLAT:g}: they are "
                "not those at the sampling temperature, before top-k",
                "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB and without custom samplers",
            )  # fmt: skip

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        await self._web.ask("POST", path, body, within_s=_LONG_S)


def _said(event: _Event) -> _Meta:
    if event.error is not None:
        raise Refused("sglang", event.error.code, f"refused the request: {event.error.message}", "see its log")
    if event.meta_info is None:
        raise EngineError("sglang answer", "meta_info", "is missing", "use SGLang 0.5.23")
    return event.meta_info


def _reason(finish: _Finish | None, stops: frozenset[int], request_id: str) -> str | None:
    """Raises: Lost: somebody ended it. Refused: it cannot be served, or ended for a reason that was not asked for."""
    if finish is None:
        return None
    if finish.type == "abort" and finish.status_code not in (None, 500, 503):
        raise Refused("sglang", finish.status_code, f"refused the request: {finish.message}", "see its log")
    if finish.type == "abort":
        raise Lost("request", request_id, f"was ended by the server ({finish.message})", "see its log")
    at_stop = isinstance(finish.matched, int) and finish.matched in stops
    if finish.type == "length" or (finish.type == "stop" and at_stop):
        return finish.type
    raise Refused(
        "sglang", f"{finish.type} {finish.matched!r}", "ended a request at nothing that was to end it",
        "see its log; every EOS must be in the model's generation_config.json",
    )  # fmt: skip


def _piece(ids: list[int], meta: _Meta, reason: str | None, count: int) -> Piece:
    """`count`: tokens of the request until now, these included."""
    said = meta.output_token_logprobs
    if [row[1] for row in said] != ids:
        raise EngineError(
            "sglang logprobs", len(said), f"are not of the {len(ids)} tokens that came", "use SGLang 0.5.23"
        )
    spans = None
    if reason is not None:
        spans = [Span(version_of("sglang", meta.weight_version), 0, count)]
        if meta.weight_versions is not None:
            spans = [Span(version_of("sglang", span.version), span.start, span.end) for span in meta.weight_versions]
    return Piece(ids, [min(0.0, row[0]) for row in said], reason, spans)
