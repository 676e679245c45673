"""What fakes of vLLM's and SGLang's server share: requests that get tokens, faults on demand, and what was asked.

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
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

VOCABULARY = 40
SAYS = ("memory", "port", "model", "argument", "gpu", "cause", "odd", "killed")


def last_words(of: str, out_of_memory: str) -> str:
    """The log of a server that does not start."""
    waiting = "".join(f'(APIServer pid=5)   File "server.py", line {n}, in start\n' for n in range(40))
    return {
        "memory": out_of_memory,
        "port": "OSError: [Errno 98] error while attempting to bind: address already in use",
        "model": "ValueError: Model architectures ['Odd'] are not supported for now.",
        "argument": "server.py: error: unrecognized arguments: --odd",
        "gpu": "RuntimeError: No CUDA GPUs are available",
        "cause": f"(Engine pid=7) ERROR [core.py:9] {out_of_memory}\n{waiting}RuntimeError: Engine failed to start",
        "odd": f"(Engine pid=7) ERROR [core.py:9] OddError: 7 is odd\n{waiting}bye",
    }[of]


class Generating:
    """One request at the server."""

    def __init__(self, name: str, prompt: list[int], stops: Sequence[int], max_tokens: int, noise: int) -> None:
        self.name, self.prompt, self.stops, self.max_tokens, self.noise = name, prompt, stops, max_tokens, noise
        self.sampled: list[int] = []
        self.told = 0  # tokens that were sent
        self.spans: list[list[Any]] = []
        self.reason: str | None = None
        self.news = asyncio.Event()

    def step(self, version: str, count: int) -> None:
        for _ in range(count):
            if self.reason is not None:
                return
            token = 3 + ((len(self.prompt) + len(self.sampled)) * 7 + self.noise) % 36
            if not self.spans or self.spans[-1][0] != version:
                self.spans.append([version, len(self.sampled), 0])
            self.sampled.append(token)
            self.spans[-1][2] = len(self.sampled)
            if token in self.stops:
                self.reason = "stop"
            elif len(self.sampled) == self.max_tokens:
                self.reason = "length"
        self.news.set()

    def said_spans(self, fault: str | None) -> list[dict[str, Any]]:
        """The version of each token, as both servers say it."""
        spans = [["77", 0, len(self.sampled)]] if fault == "wrong" else self.spans
        return [{"version": version, "start": start, "end": end} for version, start, end in spans]


class FakeServer:
    """The server's state."""

    version: str
    out_of_memory: str  # what it says then

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.held, self.paused = options, options.fake_held, False
        self.running: dict[str, Generating] = {}
        self.seen: deque[Any] = deque(maxlen=3000)
        self.faults: dict[str, str] = {}
        self.loaded = b""
        self.lag = 0  # newest tokens of each request that stay unsent until the next step or resume
        self.hung = asyncio.Event()
        if options.fake_silent:
            self.hung.set()

    def event(self, each: Generating, ids: list[int], last: bool) -> dict[str, Any]:
        """As the server sends more tokens of a request."""
        raise NotImplementedError

    def routes(self) -> list[Route]:
        """Those of this kind of server."""
        raise NotImplementedError

    def fault(self, name: str) -> str | None:
        return self.faults.pop(name, None)

    async def struck(self, name: str) -> str | None:
        """The fault of this name; those that end or hang a server do so."""
        fault = self.fault(name)
        if fault == "die":
            os.killpg(0, signal.SIGKILL)
        if fault == "hang":
            self.hung.set()
        await self.awake()
        return fault

    def answer(self, each: Generating) -> Response:
        self.running[each.name] = each
        return StreamingResponse(self.stream(each), media_type="text/event-stream")

    async def stream(self, each: Generating) -> AsyncIterator[str]:
        try:
            while True:
                flows = not (self.held or self.paused)
                if flows:
                    each.step(self.version, 7)
                ended = each.reason is not None
                end = len(each.sampled) - (0 if ended else self.lag)
                if end > each.told or ended:
                    ids, each.told = each.sampled[each.told : end], end
                    yield f"data: {json.dumps(self.event(each, ids, ended))}\n\n"
                    await self.awake()
                    if self.fault("cut"):
                        return
                if ended:
                    break
                if flows:
                    await asyncio.sleep(0)
                else:
                    each.news.clear()
                    await each.news.wait()
            yield "data: [DONE]\n\n"
        finally:
            self.seen.append(["ended", each.name, each.reason or "aborted", len(each.sampled)])
            self.running.pop(each.name, None)

    def go_on(self) -> None:
        self.paused, self.lag = False, 0
        self.wake()

    def wake(self) -> None:
        for each in self.running.values():
            each.news.set()

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
        elif what == "pause":
            self.paused = True
        elif what == "release":
            self.held = False
            self.wake()
        elif what == "step":
            while len(self.running) < body["requests"]:
                await asyncio.sleep(0.001)
            for each in () if self.paused else self.running.values():
                each.step(self.version, body["tokens"])
        return JSONResponse({"running": len(self.running), "loaded": len(self.loaded)})

    async def awake(self) -> None:
        if self.hung.is_set():
            await asyncio.Event().wait()


def misfit(found: dict[str, Any], needed: dict[str, Any]) -> str:
    """Why these are not the settings that are needed, each a value or types; "": they are."""
    if found.keys() != needed.keys():
        return f"keys {sorted(found.keys() ^ needed.keys())}"
    for name, value in needed.items():
        fits = isinstance(found[name], value) if isinstance(value, type | tuple) else found[name] == value
        if not fits:
            return f"{name}={found[name]!r}"
    return ""


def unknown(ids: list[Any]) -> bool:
    """They are not ids of the model."""
    return not all(isinstance(i, int) and 0 <= i < VOCABULARY for i in ids)


def broken(why: str, status: int = 500) -> Response:
    return JSONResponse({"error": {"message": why, "code": status}}, status)


def options_parser() -> argparse.ArgumentParser:
    """Knows what fakes may be told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fake-says", choices=SAYS)
    for name in ("fake-held", "fake-silent"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def run(kind: type[FakeServer], options: argparse.Namespace, environment: dict[str, str]) -> None:
    """Serve until killed. `environment`: what a server needs."""
    if any(os.environ.get(name) != value for name, value in environment.items()) or "ASTRAFLOW_TOKEN" in os.environ:
        sys.exit("the environment is not that of a server")
    if options.fake_says == "killed":
        os.killpg(0, signal.SIGKILL)
    if options.fake_says:
        sys.exit(last_words(options.fake_says, kind.out_of_memory))

    async def serve() -> None:
        fake = kind(options)
        control = Route("/fake/{what}", fake.control, methods=["GET", "POST"])
        routes = [*fake.routes(), Route("/health", fake.health), control]
        config = uvicorn.Config(
            Starlette(routes=routes), host=options.host, port=options.port, log_level="warning",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        await uvicorn.Server(config).serve()

    asyncio.run(serve())
