"""A process that speaks as SGLang's server does, samples nothing real, and refuses every request that SGLang would not
take or that this project must not send. `python fake_sglang.py OPTIONS OF SGLANG`.

Held (`--fake-held`), requests get tokens when `POST /fake/step` says so. `POST /fake/fault` makes something go wrong
next. `GET /fake/seen` tells what was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VOCABULARY = 40
RESERVED = 6  # tokens of the context that SGLang keeps back from prompts
BODY: dict[str, Any] = {
    "rid": str, "input_ids": list, "sampling_params": dict, "return_logprob": True, "logprob_start_len": -1,
    "top_logprobs_num": 0, "return_text_in_logprobs": False, "stream": bool,
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "n": 1, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": int, "min_new_tokens": 0,
    "ignore_eos": False, "stop_token_ids": list,
}  # fmt: skip
"""A value that is needed, or types that are."""
UPDATE: dict[str, Any] = {
    "model_path": str, "load_format": "safetensors", "weight_version": str, "flush_cache": True,
    "abort_all_requests": False,
}  # fmt: skip
SAYS = {
    "memory": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    "port": "OSError: [Errno 98] error while attempting to bind on address: address already in use",
    "model": "ValueError: Model architectures ['Odd'] are not supported for now.",
    "argument": "launch_server.py: error: unrecognized arguments: --odd",
    "gpu": "RuntimeError: No CUDA GPUs are available",
}


class Generating:
    """One request at the server."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.rid, self.prompt, self.params = body["rid"], body["input_ids"], body["sampling_params"]
        self.sampled: list[int] = []
        self.told = 0  # tokens that were sent
        self.spans: list[list[Any]] = []
        self.finish: dict[str, Any] | None = None
        self.news = asyncio.Event()

    def step(self, version: str, count: int) -> None:
        for _ in range(count):
            if self.finish is not None:
                return
            at = len(self.prompt) + len(self.sampled)
            seed = self.params.get("sampling_seed", 0) if self.params["temperature"] else 0
            token = 3 + (at * 7 + self.prompt[0] + seed) % 36
            if not self.spans or self.spans[-1][0] != version:
                self.spans.append([version, len(self.sampled), 0])
            self.sampled.append(token)
            self.spans[-1][2] = len(self.sampled)
            if token in self.params["stop_token_ids"]:
                self.finish = {"type": "stop", "matched": token}
            elif len(self.sampled) == self.params["max_new_tokens"]:
                self.finish = {"type": "length", "length": len(self.sampled)}
        self.news.set()


class Fake:
    """The server's state."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.held = options, options.fake_held
        self.retracted = False
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.version = options.weight_version
        self.running: dict[str, Generating] = {}
        self.seen: deque[Any] = deque(maxlen=3000)
        self.faults: dict[str, str] = {}
        self.loaded = b""
        self.hung = asyncio.Event()

    def fault(self, name: str) -> str | None:
        return self.faults.pop(name, None)

    async def generate(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        self.seen.append(["generate", body])
        wrong = problem(body, self.options)
        if wrong:
            return JSONResponse({"error": {"message": wrong}}, 400)
        if self.fault("generate"):
            return JSONResponse({"error": {"message": "not now"}}, 400)
        await self.unpaused.wait()
        if not body["stream"]:
            return JSONResponse(self.probe(body))
        if body["rid"] in self.running:
            return JSONResponse({"error": {"message": f"Duplicate request ID {body['rid']}"}}, 400)
        each = self.running[body["rid"]] = Generating(body)
        return StreamingResponse(self.stream(each), media_type="text/event-stream")

    def probe(self, body: dict[str, Any]) -> dict[str, Any]:
        """One token at a temperature at which all are equally likely."""
        assert (
            body["sampling_params"] | {"temperature": 1e6, "top_k": 1, "max_new_tokens": 1} == body["sampling_params"]
        )
        said = float(self.options.fake_probe or -math.log(VOCABULARY) + 0.003)
        meta = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[said, 7, None]]}
        return {"output_ids": [7], "meta_info": meta}

    async def stream(self, each: Generating) -> AsyncIterator[str]:
        try:
            while True:
                if not self.held and self.unpaused.is_set():
                    each.step(self.version, 7)
                if len(each.sampled) > each.told or each.finish is not None:
                    for event in self.events(each):
                        yield f"data: {json.dumps(event)}\n\n"
                    await self.awake()
                    if self.fault("cut"):
                        return
                if each.finish is not None:
                    break
                if self.held or not self.unpaused.is_set():
                    each.news.clear()
                    await each.news.wait()
                else:
                    await asyncio.sleep(0)
            yield "data: [DONE]\n\n"
        finally:
            self.seen.append(["ended", each.rid, each.finish, len(each.sampled)])
            self.running.pop(each.rid, None)

    def events(self, each: Generating) -> list[dict[str, Any]]:
        if self.fault("error"):
            each.finish = {}
            return [{"error": {"message": "no such thing", "type": "invalid_request_error", "code": 400}}]
        ids = each.sampled[each.told :]
        each.told = len(each.sampled)
        rows = [[-i / 64, i, None] for i in ids]
        meta: dict[str, Any] = {
            "id": each.rid, "finish_reason": each.finish, "prompt_tokens": len(each.prompt),
            "weight_version": self.version, "num_retractions": 0, "completion_tokens": len(each.sampled),
            "output_token_logprobs": rows, "output_token_logprobs_length": len(each.sampled),
        }  # fmt: skip
        if each.finish is not None and each.finish["type"] == "abort":  # as SGLang does: its last token once more
            ids, meta["output_token_logprobs"] = each.sampled[-1:], [[-i / 64, i, None] for i in each.sampled]
        elif each.finish is not None:
            spans = [["77", 0, len(each.sampled)]] if self.fault("spans") == "wrong" else each.spans
            if self.options.fake_spans:
                meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
            meta["weight_version"] = spans[-1][0]
            meta["finish_reason"] |= json.loads(self.fault("finish") or "{}")
        return [{"output_ids": ids, "meta_info": meta}]

    async def pause(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        self.seen.append(["pause", body])
        if body != {"mode": "retract"}:
            return broken(f"pause {body}")
        self.unpaused.clear()
        self.retracted = True
        return JSONResponse({"status": "ok"})

    async def resume(self, request: Request) -> Response:
        self.seen.append(["resume", await request.json()])
        self.retracted = False
        self.unpaused.set()
        for each in self.running.values():
            each.news.set()
        return JSONResponse({"status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(["abort", body])
        if body != {"abort_all": True} and set(body) != {"rid"}:
            return broken(f"abort {body}")
        for each in list(self.running.values()):
            if (body.get("abort_all") or each.rid == body["rid"]) and each.finish is None:
                each.finish = {"type": "abort", "message": "Abort in waiting queue"}
                each.news.set()
        return Response()

    async def update(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(["update", body])
        fault = self.fault("update")
        if fault == "die":
            os.killpg(0, signal.SIGKILL)
        if fault == "hang":
            self.hung.set()
        await self.awake()
        wrong = misfit(body, UPDATE) or ("" if self.retracted else "updated while requests may run")
        going = [each.rid for each in self.running.values() if each.finish is None]
        if fault == "refuse" or wrong or going:
            message = wrong or "Weights were updated, but the cache was not flushed"
            return JSONResponse({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self.loaded = (Path(body["model_path"]) / "model.safetensors").read_bytes()
        self.version = str(int(body["weight_version"]))
        return JSONResponse({"success": True, "message": "ok", "num_paused_requests": 0})

    async def label(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(["label", body])
        if set(body) != {"new_version", "abort_all_requests"} or body["abort_all_requests"]:
            return broken(f"label {body}")
        self.version = str(int(body["new_version"]))
        return JSONResponse({"success": True})

    async def about(self, request: Request) -> Response:
        options = self.options
        return JSONResponse({
            "version": options.fake_version, "dtype": options.dtype, "model_path": options.model_path,
            "max_req_input_len": options.context_length - RESERVED, "max_total_num_tokens": 4096,
            "incremental_streaming_output": options.incremental_streaming_output, "speculative_algorithm": None,
            "enable_deterministic_inference": options.enable_deterministic_inference,
            "stream_interval": options.stream_interval, "internal_states": [{}],
        } | json.loads(self.fault("about") or "{}"))  # fmt: skip

    async def loads(self, request: Request) -> Response:
        await self.awake()
        if dict(request.query_params) != {"include": "core"}:
            return broken("loads")
        load = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 1, "token_usage": 0.25}
        return JSONResponse({"timestamp": "", "loads": [load]})

    async def health(self, request: Request) -> Response:
        await self.awake()
        return Response()

    async def control(self, request: Request) -> Response:
        what, body = request.path_params["what"], json.loads(await request.body() or b"{}")
        if what == "seen":
            return JSONResponse(list(self.seen))
        if what == "fault":
            self.faults |= body
            if "hang" in body:
                self.hung.set()
        elif what == "pause":
            self.unpaused.clear()
        elif what == "release":
            self.held = False
            for each in self.running.values():
                each.news.set()
        elif what == "step":
            while len(self.running) < body["requests"]:
                await asyncio.sleep(0.001)
            if self.unpaused.is_set():
                for each in self.running.values():
                    each.step(self.version, body["tokens"])
        return JSONResponse({"running": len(self.running), "loaded": len(self.loaded)})

    async def awake(self) -> None:
        if self.hung.is_set():
            await asyncio.Event().wait()


def problem(body: dict[str, Any], options: argparse.Namespace) -> str:
    """Why the request is none, or ""."""
    params = body.get("sampling_params", {})
    needed = PARAMS | ({"sampling_seed": int} if options.enable_deterministic_inference and body.get("stream") else {})
    if wrong := misfit(body, BODY) or misfit(params, needed):
        return wrong
    if params["top_k"] != -1 and params["top_k"] < 1:
        return f"top_k={params['top_k']}"
    if not all(isinstance(i, int) and 0 <= i < VOCABULARY for i in body["input_ids"]):
        return "token ids"
    if len(body["input_ids"]) >= options.context_length - RESERVED:
        return "the input is too long"
    if len(body["input_ids"]) + params["max_new_tokens"] > options.context_length - 2:
        return f"{len(body['input_ids'])} + {params['max_new_tokens']} tokens are too many"
    return ""


def misfit(found: dict[str, Any], needed: dict[str, Any]) -> str:
    if found.keys() != needed.keys():
        return f"keys {sorted(found.keys() ^ needed.keys())}"
    for name, value in needed.items():
        fits = isinstance(found[name], value) if isinstance(value, type) else found[name] == value
        if not fits:
            return f"{name}={found[name]!r}"
    return ""


def broken(why: str) -> Response:
    return JSONResponse({"error": {"message": why}}, 400)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Every option that this project gives SGLang, and no other."""
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "dtype", "sampling-defaults", "load-format"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("skip-tokenizer-init", "incremental-streaming-output", "enable-deterministic-inference"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("port", "random-seed", "max-running-requests", "stream-interval"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--fake-says", choices=SAYS)
    parser.add_argument("--fake-version", default="0.5.23")
    parser.add_argument("--fake-probe", default="")
    for name in ("fake-held", "fake-silent", "fake-spans"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed(sys.argv[1:])
    needed = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if any(os.environ.get(name) != value for name, value in needed.items()) or "ASTRAFLOW_TOKEN" in os.environ:
        sys.exit("the environment is not that of a server")
    if not (options.skip_tokenizer_init and options.sampling_defaults == "openai"):
        sys.exit("the options are not those of a server")
    if options.fake_says:
        sys.exit(SAYS[options.fake_says])

    async def serve() -> None:
        fake = Fake(options)
        if options.fake_silent:
            fake.hung.set()
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/generate", fake.generate, methods=post), Route("/pause_generation", fake.pause, methods=post),
            Route("/continue_generation", fake.resume, methods=post),
            Route("/abort_request", fake.abort, methods=post),
            Route("/update_weights_from_disk", fake.update, methods=post),
            Route("/update_weight_version", fake.label, methods=post), Route("/server_info", fake.about, methods=get),
            Route("/v1/loads", fake.loads, methods=get), Route("/health", fake.health, methods=get),
            Route("/fake/{what}", fake.control, methods=["GET", "POST"]),
        ]  # fmt: skip
        config = uvicorn.Config(
            Starlette(routes=routes), host=options.host, port=options.port, log_level="warning",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        await uvicorn.Server(config).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
