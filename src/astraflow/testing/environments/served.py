"""Any environment over HTTP: the reference for `type = "http"`, and a server to test yours against."""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from astraflow.environments.adapters.http import Opening
from astraflow.environments.worlds import World, Worlds
from astraflow.errors import EpisodeError
from astraflow.types import Action, Task
from astraflow.wire.app import bind, serve

_START_S = 30.0


class Begin(msgspec.Struct, frozen=True):
    """Body of `POST /episodes/{id}`."""

    task: dict[str, Any]
    seed: int


@dataclass
class _Episode:
    world: World
    opening: bytes = b""
    steps: list[bytes] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # a repeated request waits for the first one's answer


class EnvironmentService:
    """The four endpoints.

    | endpoint                        | does                                                             |
    |---------------------------------|------------------------------------------------------------------|
    | `POST /episodes/{id}`           | resets a fresh environment; the same id again: the same opening  |
    | `POST /episodes/{id}/steps/{n}` | makes step n, from 1; a step that was made says the same again   |
    | `DELETE /episodes/{id}`         | closes it; also what is not there                                |
    | `GET /health`                   | `{"live": 3}`                                                    |
    """

    def __init__(self, environment: str | Mapping[str, Any], *, token: str = "", sides: int = 1) -> None:
        self._worlds, self._token = Worlds(environment, sides=sides), token
        self._episodes: dict[str, _Episode] = {}
        self.app = Starlette(routes=self._routes())

    def _routes(self) -> Sequence[Route]:
        return [
            Route("/episodes/{id}", self._begin, methods=["POST"]),
            Route("/episodes/{id}/steps/{n:int}", self._step, methods=["POST"]),
            Route("/episodes/{id}", self._end, methods=["DELETE"]),
            Route("/health", self._health, methods=["GET"]),
        ]

    async def _begin(self, request: Request) -> Response:
        if refused := self._stranger(request):
            return refused
        try:
            asked = msgspec.json.decode(await request.body(), type=Begin)
        except msgspec.DecodeError as error:
            return _sentence(400, f"the body is no beginning of an episode: {error}")
        name = request.path_params["id"]
        known = self._episodes.get(name)
        if known is None:
            known = self._episodes[name] = _Episode(self._worlds.open())
        async with known.turn:
            if not known.opening:
                try:
                    task = Task("http", 0, 0, {**asked.task, "seed": asked.seed})
                    messages, side = await known.world.reset(task)
                except EpisodeError as error:
                    return _sentence(500, str(error))
                known.opening = msgspec.json.encode(Opening("", messages, known.world.tools, side))
                if self._worlds.sides > 1:
                    text = messages[-1]["content"]
                    known.opening = msgspec.json.encode(Opening(text, [], known.world.tools, side))
            return _json(known.opening)

    async def _step(self, request: Request) -> Response:
        if refused := self._stranger(request):
            return refused
        known = self._episodes.get(request.path_params["id"])
        if known is None:
            return _sentence(404, "there is no such episode")
        try:
            action = msgspec.json.decode(await request.body(), type=Action)
        except msgspec.DecodeError as error:
            return _sentence(400, f"the body is no action: {error}")
        number = request.path_params["n"]
        async with known.turn:
            if number == len(known.steps) + 1:
                try:
                    known.steps.append(msgspec.json.encode(await known.world.step(action)))
                except EpisodeError as error:
                    return _sentence(500, str(error))
            if not 1 <= number <= len(known.steps):
                return _sentence(409, f"step {number} cannot follow step {len(known.steps)}")
            return _json(known.steps[number - 1])

    async def _end(self, request: Request) -> Response:
        if refused := self._stranger(request):
            return refused
        known = self._episodes.pop(request.path_params["id"], None)
        if known is not None:
            await known.world.close()
        return _json(b"{}")

    async def _health(self, request: Request) -> Response:
        return _json(msgspec.json.encode({"live": len(self._episodes)}))

    def _stranger(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        return _sentence(401, "the bearer token is missing or wrong")


class Served:
    """An app in a thread: `with Served(service.app) as url:`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._url, self._ready = app, "", threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="environments", daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        self._ready.wait(_START_S)
        return self._url

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(_START_S)

    async def _main(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        await serve(self._app, bind("127.0.0.1", 0, "port"), self._on_ready, stop)

    def _on_ready(self, url: str) -> None:
        self._url = url
        self._ready.set()


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _sentence(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"error": text}), status, media_type="application/json")
