"""A process that speaks as vLLM's server does, samples nothing real, and refuses every request that vLLM would not
take or that this project must not send. `python fake_vllm.py OPTIONS OF VLLM`; see `fake_server`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fake_server import FakeServer, Generating, broken, misfit, options_parser, run, unknown

BODY: dict[str, Any] = {"request_id": str, "token_ids": list, "sampling_params": dict, "stream": True}
PARAMS: dict[str, Any] = {
    "n": 1, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "repetition_penalty": 1.0, "seed": (int, type(None)), "max_tokens": int,
    "min_tokens": 0, "ignore_eos": True, "stop_token_ids": list, "logprobs": 0, "detokenize": False,
    "extra_args": (dict, type(None)),
}  # fmt: skip
"""A value that is needed, or types that are."""
TOLD = "astraflow_logprob_temperature"
UPDATES = {"start_weight_update": "", "update_weights": "started", "finish_weight_update": "updated"}


class FakeVllm(FakeServer):
    out_of_memory = "ValueError: No available memory for the cache blocks."

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.version, self.updating, self.serial = "default", "", 0
        self.loaded = (Path(options.model) / "model.safetensors").read_bytes()

    def routes(self) -> list[Route]:
        post = {
            "inference/v1/generate": self.generate, "pause": self.pause, "resume": self.resume,
            "collective_rpc": self.rpc, "update_weight_version": self.label, **dict.fromkeys(UPDATES, self.update),
        }  # fmt: skip
        get = {"v1/models": self.models, "metrics": self.metrics}
        routes = [Route(f"/{path}", act, methods=["POST"]) for path, act in post.items()]
        return routes + [Route(f"/{path}", act) for path, act in get.items()]

    async def generate(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        self.seen.append(["generate", body])
        if wrong := problem(body, self.options.max_model_len):
            return broken(wrong, 400)
        if self.fault("generate"):
            return broken("not now", 400)
        self.serial += 1
        params, prompt = body["sampling_params"], body["token_ids"]
        name = f"generate-tokens-{body['request_id']}-{self.serial:08x}"
        each = Generating(name, prompt, params["stop_token_ids"], params["max_tokens"], sum(prompt) % 5)
        return self.answer(each)

    def event(self, each: Generating, ids: list[int], last: bool) -> dict[str, Any]:
        choice = {
            "index": 0, "finish_reason": each.reason if last else None, "stop_reason": None, "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -i / 64, "rank": 1, "top_logprobs": []} for i in ids]},
            "weight_versions": each.said_spans(self.fault("spans")) if last else None,
        }  # fmt: skip
        return {"request_id": each.name, "usage": None, "output_mode": "tokens", "choices": [choice]}

    async def pause(self, request: Request) -> Response:
        await self.awake()
        self.seen.append(["pause", dict(request.query_params)])
        if request.query_params.get("mode") != "keep":
            return broken("mode", 400)
        self.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        if self.updating:
            return broken("resumed within an update")
        self.seen.append(["resume"])
        self.go_on()
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
        fault = await self.struck(step)
        if fault == "refuse" or not self.paused:
            return broken(f"{step} while paused={self.paused}")
        if self.updating != UPDATES[step]:
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
        body = await request.json()
        self.seen.append(["label", body])
        self.version = str(int(body["new_version"]))
        return JSONResponse({"success": True})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "max_model_len": self.options.max_model_len}]})

    async def metrics(self, request: Request) -> Response:
        await self.awake()
        labels = '{engine="0",model_name="m"}'
        return PlainTextResponse(
            f"# HELP x\nvllm:num_requests_running{labels} {len(self.running)}.0\n"
            f"vllm:num_requests_waiting{labels} 1.0\nvllm:kv_cache_usage_perc{labels} 0.25\n"
        )


def problem(body: dict[str, Any], limit: int) -> str:
    """Why the request is none, or ""."""
    salted = {"cache_salt": str} if "cache_salt" in body else {}
    params = body.get("sampling_params", {})
    if wrong := misfit(body, BODY | salted) or misfit(params, PARAMS):
        return wrong
    if any(character in "@/\\" for character in body.get("cache_salt", "")):
        return "cache_salt"
    if params["extra_args"] is not None and set(params["extra_args"]) != {TOLD}:
        return f"extra_args={params['extra_args']}"
    if unknown(body["token_ids"]):
        return "token ids"
    if len(body["token_ids"]) + params["max_tokens"] > limit:
        return f"{len(body['token_ids'])} + {params['max_tokens']} tokens are more than {limit}"
    return ""


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Every option that this project gives vLLM, and no other."""
    parser = options_parser()
    for name in ("model", "host", "dtype", "generation-config", "logprobs-mode", "worker-extension-cls"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("enable-scale-out", "disable-uvicorn-access-log"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("port", "seed", "max-num-seqs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--weight-transfer-config", type=json.loads, required=True)
    parser.add_argument("--logits-processors", nargs="+", required=True)
    return parser.parse_args(arguments)


def end_with_the_node() -> None:
    """As `astraflow.engines.vllm.inside.serve` does it."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with_the_node, daemon=True).start()
    needed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "astraflow", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    run(FakeVllm, parsed(sys.argv[1:]), needed)


if __name__ == "__main__":
    main()
