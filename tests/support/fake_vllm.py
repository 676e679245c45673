"""A process that speaks as vLLM's server does, samples nothing real, and refuses every request that vLLM would not
take or that this project must not send. `python fake_vllm.py OPTIONS OF VLLM`.

Held (`--fake-held`), requests get tokens when `POST /fake/step` says so. `POST /fake/fault` makes something go wrong
next. `GET /fake/seen` tells what was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PARAMS: dict[str, Any] = {
    "n": 1, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": (int, type(None)), "max_tokens": int,
    "min_tokens": 0, "ignore_eos": True, "stop_token_ids": list, "logprobs": 0, "detokenize": False,
    "extra_args": (dict, type(None)),
}  # fmt: skip
"""A value that is needed, or types that are."""
TOLD = "astraflow_logprob_temperature"
SAYS = {
    "memory": "ValueError: No available memory for the cache blocks.",
    "port": "OSError: [Errno 98] error while attempting to bind: address already in use",
    "model": "ValueError: Model architectures ['Odd'] are not supported for now.",
    "argument": "api_server.py: error: unrecognized arguments: --odd",
}


class Generating:
    """One request at the server."""

    def __init__(self, name: str, prompt: list[int], params: dict[str, Any]) -> None:
        self.name, self.prompt, self.params = name, prompt, params
        self.sampled: list[int] = []
        self.told = 0  # tokens that were sent
        self.spans: list[list[Any]] = []
        self.reason: str | None = None
        self.news = asyncio.Event()

    def step(self, version: str, count: int, limit: int) -> None:
        for _ in range(count):
            if self.reason is not None:
                return
            at = len(self.prompt) + len(self.sampled)
            token = 3 + (at * 7 + sum(self.prompt) % 5) % 36
            if not self.spans or self.spans[-1][0] != version:
                self.spans.append([version, len(self.sampled), 0])
            self.sampled.append(token)
            self.spans[-1][2] = len(self.sampled)
            if token in self.params["stop_token_ids"]:
                self.reason = "stop"
            elif len(self.sampled) == self.params["max_tokens"] or at + 1 == limit:
                self.reason = "length"
        self.news.set()


class Fake:
    """The server's state."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.held, self.paused = options, options.fake_held, False
        self.version, self.updating = "default", ""
        self.running: dict[str, Generating] = {}
        self.seen: deque[Any] = deque(maxlen=2000)
        self.faults: dict[str, str] = {}
        self.loaded = self.content()
        self.lag = 0  # newest tokens of each request that stay unsent until the next step or resume
        self.serial = 0
        self.hung = asyncio.Event()

    def content(self) -> bytes:
        return (Path(self.options.model) / "model.safetensors").read_bytes()

    def fault(self, name: str) -> str | None:
        return self.faults.pop(name, None)

    def advance(self, count: int) -> None:
        if not self.paused:
            for each in self.running.values():
                each.step(self.version, count, self.options.max_model_len)

    async def generate(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        self.seen.append(["generate", body])
        params = body.get("sampling_params", {})
        wrong = problem(body, params, self.options.max_model_len)
        if wrong:
            return JSONResponse({"error": {"message": wrong, "code": 400}}, 400)
        if self.fault("generate"):
            return JSONResponse({"error": {"message": "not now", "code": 400}}, 400)
        self.serial += 1
        name = f"generate-tokens-{body['request_id']}-{self.serial:08x}"
        each = self.running[name] = Generating(name, body["token_ids"], params)
        return StreamingResponse(self.stream(each), media_type="text/event-stream")

    async def stream(self, each: Generating) -> AsyncIterator[str]:
        try:
            while True:
                if not self.held and not self.paused:
                    each.step(self.version, 7, self.options.max_model_len)
                end = len(each.sampled) - (self.lag if each.reason is None else 0)
                if end > each.told:
                    yield f"data: {json.dumps(self.event(each, end))}\n\n"
                    each.told = end
                    await self.awake()
                    if self.fault("cut"):
                        return
                if each.reason is not None and each.told == len(each.sampled):
                    break
                if self.held or self.paused:
                    each.news.clear()
                    await each.news.wait()
                else:
                    await asyncio.sleep(0)
            yield "data: [DONE]\n\n"
        finally:
            self.seen.append(["ended", each.name, each.reason or "aborted", len(each.sampled)])
            self.running.pop(each.name, None)

    def event(self, each: Generating, end: int) -> dict[str, Any]:
        ids = each.sampled[each.told : end]
        last = end == len(each.sampled) and each.reason is not None
        spans = [{"version": v, "start": a, "end": b} for v, a, b in each.spans]
        if last and self.fault("spans") == "wrong":
            spans = [{"version": "77", "start": 0, "end": len(each.sampled)}]
        choice = {
            "index": 0, "finish_reason": each.reason if last else None, "stop_reason": None, "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -i / 64, "rank": 1, "top_logprobs": []} for i in ids]},
            "weight_versions": spans if last else None,
        }  # fmt: skip
        return {"request_id": each.name, "usage": None, "output_mode": "tokens", "choices": [choice]}

    async def pause(self, request: Request) -> Response:
        await self.awake()
        self.seen.append(["pause", dict(request.query_params)])
        if request.query_params.get("mode") != "keep":
            return JSONResponse({"error": "mode"}, 400)
        self.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        if self.updating:
            return broken("resumed within an update")
        self.seen.append(["resume"])
        self.paused, self.lag = False, 0
        for each in self.running.values():
            each.news.set()
        return JSONResponse({"status": "resumed"})

    async def rpc(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        method, args = body["method"], body["args"]
        self.seen.append([method, *args])
        result: Any
        if method == "astraflow_about":
            result = {
                "backend": (self.options.weight_transfer_config or {}).get("backend", ""),
                "logprobs_mode": self.options.logprobs_mode, "logits_processors": self.options.logits_processors,
                "dtype": self.options.dtype, "sees_weights": Path(args[0]).is_file(),
            } | json.loads(self.fault("about") or "{}")  # fmt: skip
        elif method == "astraflow_sampled":
            if not self.paused:
                return broken("counts are exact while paused only")
            result = {each.name: len(each.sampled) for each in self.running.values()}
        elif method == "astraflow_differences":
            same = Path(args[0]).read_bytes() == self.loaded
            result = {"compared": 9, "differing": [] if same else ["a.weight"], "unknown": []}
            if self.fault("compare") == "unknown":
                result = {"compared": 8, "differing": [], "unknown": ["odd"]}
        else:
            return broken(f"no method {method}")
        return JSONResponse({"results": [result]})

    async def update(self, request: Request) -> Response:
        step, body = request.url.path.strip("/"), await request.json()
        self.seen.append([step, body])
        fault = self.fault(step)
        if fault == "die":
            os.killpg(0, signal.SIGKILL)
        if fault == "hang":
            self.hung.set()
        await self.awake()
        if fault == "refuse" or not self.paused:
            return broken(f"{step} while paused={self.paused}")
        before = {"start_weight_update": "", "update_weights": "started", "finish_weight_update": "updated"}[step]
        if self.updating != before:
            return broken(f"{step} after {self.updating!r}")
        if step == "start_weight_update":
            self.updating = "started"
        elif step == "update_weights":
            self.updating, self.loaded = "updated", Path(body["update_info"]["path"]).read_bytes()
            if fault == "torn":
                self.loaded = b""
        else:
            self.updating, self.version = "", str(int(body["weight_version"]))
        return JSONResponse({"message": "ok"})

    async def label(self, request: Request) -> Response:
        self.version = str(int((await request.json())["new_version"]))
        self.seen.append(["label", self.version])
        return JSONResponse({"success": True})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "max_model_len": self.options.max_model_len}]})

    async def metrics(self, request: Request) -> Response:
        await self.awake()
        labels = '{engine="0",model_name="m"}'
        return PlainTextResponse(
            f"# HELP x\nvllm:num_requests_running{labels} {len(self.running)}.0\n"
            f"vllm:num_requests_waiting{labels} 0.0\nvllm:kv_cache_usage_perc{labels} 0.25\n"
        )

    async def health(self, request: Request) -> Response:
        await self.awake()
        return Response()

    async def control(self, request: Request) -> Response:
        what, body = request.path_params["what"], json.loads(await request.body() or b"{}")
        if what == "seen":
            return JSONResponse(list(self.seen))
        if what == "fault":
            self.faults |= body
            self.lag = int(body.get("lag", self.lag))
            if "hang" in body:
                self.hung.set()
        elif what == "release":
            self.held = False
            for each in self.running.values():
                each.news.set()
        elif what == "step":
            while len(self.running) < body["requests"]:
                await asyncio.sleep(0.001)
            self.advance(body["tokens"])
        return JSONResponse({"running": len(self.running)})

    async def awake(self) -> None:
        if self.hung.is_set():
            await asyncio.Event().wait()


def problem(body: dict[str, Any], params: dict[str, Any], limit: int) -> str:
    """Why the request is none, or ""."""
    if set(body) != {"request_id", "token_ids", "sampling_params", "stream"} or body["stream"] is not True:
        return f"keys {sorted(body)}"
    if params.keys() != PARAMS.keys():
        return f"sampling parameters {sorted(params.keys() ^ PARAMS.keys())}"
    for name, needed in PARAMS.items():
        value = params[name]
        if not isinstance(value, needed) if isinstance(needed, type | tuple) else value != needed:
            return f"{name}={value!r}"
    if params["extra_args"] is not None and set(params["extra_args"]) != {TOLD}:
        return f"extra_args={params['extra_args']}"
    if not all(isinstance(i, int) and 0 <= i < 40 for i in body["token_ids"]):
        return "token ids"
    if len(body["token_ids"]) + params["max_tokens"] > limit:
        return f"{len(body['token_ids'])} + {params['max_tokens']} tokens are more than {limit}"
    return ""


def broken(why: str) -> Response:
    return JSONResponse({"error": {"message": why, "code": 500}}, 500)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Every option that this project gives vLLM, and no other."""
    parser = argparse.ArgumentParser()
    for name in ("model", "host", "dtype", "generation-config", "logprobs-mode", "worker-extension-cls"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("enable-scale-out", "disable-uvicorn-access-log", "fake-held"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--weight-transfer-config", type=json.loads, required=True)
    parser.add_argument("--logits-processors", nargs="+", required=True)
    parser.add_argument("--fake-says", choices=SAYS)
    parser.add_argument("--fake-silent", action="store_true")
    return parser.parse_args(arguments)


def end_with_the_node() -> None:
    """As `astraflow.engines.vllm.inside.serve` does it."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    options = parsed(sys.argv[1:])
    needed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "astraflow", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if any(os.environ.get(name) != value for name, value in needed.items()) or "ASTRAFLOW_TOKEN" in os.environ:
        sys.exit("the environment is not that of a server")
    if options.fake_says:
        sys.exit(SAYS[options.fake_says])
    threading.Thread(target=end_with_the_node, daemon=True).start()

    async def serve() -> None:
        fake = Fake(options)
        if options.fake_silent:
            fake.hung.set()
        post, get = ["POST"], ["GET"]
        routes = [
            Route("/inference/v1/generate", fake.generate, methods=post), Route("/pause", fake.pause, methods=post),
            Route("/resume", fake.resume, methods=post), Route("/collective_rpc", fake.rpc, methods=post),
            *(Route(f"/{step}", fake.update, methods=post) for step in
              ("start_weight_update", "update_weights", "finish_weight_update")),
            Route("/update_weight_version", fake.label, methods=post), Route("/v1/models", fake.models, methods=get),
            Route("/metrics", fake.metrics, methods=get), Route("/health", fake.health, methods=get),
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
