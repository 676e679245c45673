"""A process that speaks as SGLang's server does, samples nothing real, and refuses every request that SGLang would not
take or that this project must not send. `python fake_sglang.py OPTIONS OF SGLANG`; see `fake_server`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fake_server import VOCABULARY, FakeServer, Generating, broken, misfit, options_parser, run, unknown

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


class FakeSglang(FakeServer):
    out_of_memory = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.version, self.retracted = options.weight_version, False

    def routes(self) -> list[Route]:
        post = {
            "generate": self.generate, "pause_generation": self.pause, "continue_generation": self.resume,
            "abort_request": self.abort, "update_weights_from_disk": self.update, "update_weight_version": self.label,
        }  # fmt: skip
        get = {"server_info": self.about, "v1/loads": self.loads}
        routes = [Route(f"/{path}", act, methods=["POST"]) for path, act in post.items()]
        return routes + [Route(f"/{path}", act) for path, act in get.items()]

    async def generate(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        self.seen.append(["generate", body])
        if wrong := problem(body, self.options):
            return broken(wrong, 400)
        if self.fault("generate"):
            return broken("not now", 400)
        while self.paused:
            await asyncio.sleep(0.001)
        if not body["stream"]:
            return JSONResponse(self.probe(body))
        if body["rid"] in self.running:
            return broken(f"Duplicate request ID {body['rid']}", 400)
        params, prompt = body["sampling_params"], body["input_ids"]
        noise = prompt[0] + (params.get("sampling_seed", 0) if params["temperature"] else 0)
        each = Generating(body["rid"], prompt, params["stop_token_ids"], params["max_new_tokens"], noise)
        return self.answer(each)

    def probe(self, body: dict[str, Any]) -> dict[str, Any]:
        """One token at a temperature at which all are equally likely."""
        params = body["sampling_params"]
        assert params | {"temperature": 1e6, "top_k": 1, "max_new_tokens": 1} == params
        said = float(self.options.fake_probe or -math.log(VOCABULARY) + 0.003)
        meta = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[said, 7, None]]}
        return {"output_ids": [7], "meta_info": meta}

    def event(self, each: Generating, ids: list[int], last: bool) -> dict[str, Any]:
        if self.fault("error"):
            each.reason = "error"
            return {"error": {"message": "no such thing", "type": "invalid_request_error", "code": 400}}
        ends: dict[str | None, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": (each.sampled or [None])[-1]},
            "length": {"type": "length", "length": len(each.sampled)},
            "abort": {"type": "abort", "message": "Abort in waiting queue"},
        }
        finish = ends[each.reason] if last else None
        meta: dict[str, Any] = {
            "id": each.name, "finish_reason": finish, "prompt_tokens": len(each.prompt),
            "weight_version": self.version, "num_retractions": 0, "completion_tokens": len(each.sampled),
            "output_token_logprobs_length": len(each.sampled),
        }  # fmt: skip
        told = ids
        if finish is not None and each.reason == "abort":  # as SGLang does: its last token once more
            ids, told = each.sampled[-1:], each.sampled
        elif finish is not None:
            spans = each.said_spans(self.fault("spans"))
            if self.options.fake_spans:
                meta["weight_versions"] = spans
            meta["weight_version"] = spans[-1]["version"]
            finish |= json.loads(self.fault("finish") or "{}")
        meta["output_token_logprobs"] = [[-i / 64, i, None] for i in told]
        return {"output_ids": ids, "meta_info": meta}

    async def pause(self, request: Request) -> Response:
        await self.awake()
        body = await request.json()
        self.seen.append(["pause", body])
        if body != {"mode": "retract"}:
            return broken(f"pause {body}", 400)
        self.paused = self.retracted = True
        return JSONResponse({"status": "ok"})

    async def resume(self, request: Request) -> Response:
        self.seen.append(["resume", await request.json()])
        self.retracted = False
        self.go_on()
        return JSONResponse({"status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(["abort", body])
        if body != {"abort_all": True} and set(body) != {"rid"}:
            return broken(f"abort {body}", 400)
        for each in list(self.running.values()):
            if (body.get("abort_all") or each.name == body["rid"]) and each.reason is None:
                each.reason = "abort"
                each.news.set()
        return Response()

    async def update(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(["update", body])
        fault = await self.struck("update")
        wrong = misfit(body, UPDATE) or ("" if self.retracted else "updated while requests may run")
        going = [each.name for each in self.running.values() if each.reason is None]
        if fault == "refuse" or wrong or going:
            message = wrong or "Weights were updated, but the cache was not flushed"
            return JSONResponse({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self.loaded = (Path(body["model_path"]) / "model.safetensors").read_bytes()
        self.version = str(int(body["weight_version"]))
        return JSONResponse({"success": True, "message": "ok", "num_paused_requests": 0})

    async def label(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(["label", body])
        if wrong := misfit(body, {"new_version": str, "abort_all_requests": False}):
            return broken(wrong, 400)
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
            return broken("loads", 400)
        load = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 1, "token_usage": 0.25}
        return JSONResponse({"timestamp": "", "loads": [load]})


def problem(body: dict[str, Any], options: argparse.Namespace) -> str:
    """Why the request is none, or ""."""
    params = body.get("sampling_params", {})
    needed = PARAMS | ({"sampling_seed": int} if options.enable_deterministic_inference and body.get("stream") else {})
    if wrong := misfit(body, BODY) or misfit(params, needed):
        return wrong
    if params["top_k"] != -1 and params["top_k"] < 1:
        return f"top_k={params['top_k']}"
    if unknown(body["input_ids"]):
        return "token ids"
    if len(body["input_ids"]) >= options.context_length - RESERVED:
        return "the input is too long"
    if len(body["input_ids"]) + params["max_new_tokens"] > options.context_length - 2:
        return f"{len(body['input_ids'])} + {params['max_new_tokens']} tokens are too many"
    return ""


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Every option that this project gives SGLang, and no other."""
    parser = options_parser()
    for name in ("model-path", "host", "dtype", "sampling-defaults", "load-format"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("skip-tokenizer-init", "incremental-streaming-output", "enable-deterministic-inference", "fake-spans"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("port", "random-seed", "max-running-requests", "stream-interval"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--fake-version", default="0.5.23")
    parser.add_argument("--fake-probe", default="")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed(sys.argv[1:])
    if not (options.skip_tokenizer_init and options.sampling_defaults == "openai"):
        sys.exit("the options are not those of a server")
    needed = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    run(FakeSglang, options, needed)


if __name__ == "__main__":
    main()
