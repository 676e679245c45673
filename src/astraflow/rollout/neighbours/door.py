"""The engines of a node, for other nodes of the run: `wire.streams.engines` says what is asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow.contracts import Engine
from astraflow.rollout.gateway.app import serve_within
from astraflow.rollout.gateway.calls.wakeups import Wakeups
from astraflow.rollout.loop import Guarded
from astraflow.types import Generation
from astraflow.wire.app import HttpError, bind, check_bind, create_app, json_reply, path_id, read_json
from astraflow.wire.streams.engines import Asked, EngineState, Lent, Piece

_MAX_BODY_BYTES = 64 << 20
_APART_S = 0.05  # between two pieces, where nobody is in a hurry


def create_engine_app(engines: Mapping[str, Sequence[Engine]], token: str | None) -> Starlette:
    """`engines`: of each policy, in order."""
    return create_app(_Endpoints(engines).routes(), token=token, max_body_bytes=_MAX_BODY_BYTES, bare=True)


async def lend(
    engines: Mapping[str, Sequence[Engine]], listen: str, token: str | None, tasks: Guarded, closing: AsyncExitStack
) -> str:
    """Serves them at HOST:PORT ("": loopback, any free port) until `closing` ends it; gives the URL for other nodes.

    Raises: LaunchError: it cannot be there, or beyond loopback there is no token.
    """
    host, _, port = (listen or "127.0.0.1:0").rpartition(":")
    host = host.strip("[]")
    check_bind(host, token, "listen")
    sock = bind(host, int(port), "listen")
    return await serve_within(tasks, closing, "engines for others", create_engine_app(engines, token), sock)


class _Endpoints:
    """One method per request. On one event loop."""

    def __init__(self, engines: Mapping[str, Sequence[Engine]]) -> None:
        self._engines, self._wakeups, self._serial = engines, Wakeups(), itertools.count()

    def routes(self) -> list[Route]:
        return [
            Route("/engines/{policy}", self.generate, methods=["POST"]),
            Route("/engines", self.lent),
        ]

    async def lent(self, request: Request) -> Response:
        return json_reply(Lent({name: [_state(each) for each in engines] for name, engines in self._engines.items()}))

    async def generate(self, request: Request) -> Response:
        policy, asked = path_id(request, "policy"), await read_json(request, Asked)
        engines = self._engines.get(policy, ())
        if not 0 <= asked.number < len(engines):
            raise HttpError(404, f"policy={policy} number={asked.number} has no engine on this node; ask another one")
        return StreamingResponse(self._stream(engines[asked.number], asked), media_type="text/event-stream")

    async def _stream(self, engine: Engine, asked: Asked) -> AsyncIterator[bytes]:
        request_id = f"{asked.request_id}.{next(self._serial)}"  # asked again, the first may not have ended yet
        news, loop = _News(), asyncio.get_running_loop()
        try:
            future = engine.submit(
                request_id, np.array(asked.prompt_ids, np.int32), asked.sampling,
                lambda *columns: self._wakeups.post(loop, news.add, *columns),
            )  # fmt: skip
            future.add_done_callback(lambda done: self._wakeups.post(loop, news.end, done))
            while True:
                await news.there.wait()
                piece = news.take()
                if piece.error is not None and engine.ended.done():
                    return  # cut: whoever asks goes on elsewhere
                yield b"data: " + msgspec.json.encode(piece) + b"\n\n"
                if piece.finish_reason is not None or piece.error is not None:
                    break
                if not asked.hurry:
                    await asyncio.sleep(_APART_S)
            yield b"data: [DONE]\n\n"
        finally:
            engine.cancel(request_id)


class _News:
    """What an engine has said of one generation and was not sent yet."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self._piece, self._num_said = Piece(), 0

    def add(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        piece = self._piece
        piece.token_ids = [*piece.token_ids, *map(int, ids)]
        piece.logprobs = [*piece.logprobs, *map(float, logprobs)]
        piece.versions = [*piece.versions, *map(int, versions)]
        self._num_said += len(ids)
        self.there.set()

    def end(self, future: Future[Generation]) -> None:
        if (error := future.exception()) is not None:
            self._piece.error = str(error)
        else:
            generation, rest = future.result(), slice(self._num_said, None)
            columns = (generation.token_ids, generation.logprobs, generation.versions)
            self.add(*(column[rest].tolist() for column in columns))
            self._piece.finish_reason = generation.finish_reason
        self.there.set()

    def take(self) -> Piece:
        piece, self._piece = self._piece, Piece()
        self.there.clear()
        return piece


def _state(engine: Engine) -> EngineState:
    stats = engine.stats()
    waiting = stats["waiting"] + stats.get("server_waiting", 0.0)
    return EngineState(engine.version, engine.max_context, stats["running"], waiting)
