"""An environment that another service plays: four endpoints, docs/workloads.md#environments-over-http."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, TypeVar

import msgspec

from astraflow.config.env import checked_token, secret_from_env
from astraflow.contracts import Environment
from astraflow.errors import EngineError, EpisodeError, Problem
from astraflow.types import Action, Message, Step, Task
from astraflow.wire.streams.web import Lost, Refused, Web

T = TypeVar("T")
log = logging.getLogger("astraflow.environment")
_AGAIN = frozenset({408, 429, 502, 503, 504})
_PAUSE_S = 0.1  # doubled with each try
_CLOSE_S = 5.0


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to the beginning of an episode: a text, or messages."""

    text: str = ""
    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    side: int = 0


class Http(Environment):
    """Each request is tried again when it got no answer, or 408, 429, 502, 503 or 504. It may then be the second of its
    kind: the service knows by the episode's id and the number of the step what it has done already, and says the same.
    """

    runs = "service"

    def __init__(
        self, *, url: str, token_env: str = "", retries: int = 3, try_s: float = 10.0, sides: int = 1
    ) -> None:  # fmt: skip
        """`token_env`: the variable with its bearer token. `try_s`: of one try; of all: `workflow.env_timeout_s`.

        Raises: Problem: no such address or token.
        """
        if not url.startswith(("http://", "https://")):
            raise Problem("http.url", url, "is no address", "write http://host:port or https://host")
        if retries < 0 or try_s <= 0:
            raise Problem("http.retries", f"{retries}, try_s={try_s}", "must be >= 0 and > 0", "use 3 and 10.0")
        token = secret_from_env(token_env) if token_env else None
        if token_env and not token:
            raise Problem("http.token_env", token_env, "is not set", "export the token of the service under this name")
        self._web = Web(url, checked_token(token, "http.token_env") if token else None)
        self._retries, self._try_s, self.sides = retries, try_s, sides
        self._id, self._num_steps, self._begun = secrets.token_hex(8), 0, False
        self._tools: list[dict[str, Any]] = []

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    async def reset(self, task: Task) -> list[Message] | Step:
        self._begun = True
        opening = await self._ask(f"/episodes/{self._id}", {"task": task.fields, "seed": task.seed}, Opening)
        self._tools = opening.tools
        return opening.messages or Step(opening.text, side=opening.side)

    async def step(self, action: Action) -> Step:
        self._num_steps += 1
        return await self._ask(f"/episodes/{self._id}/steps/{self._num_steps}", msgspec.to_builtins(action), Step)

    async def close(self) -> None:
        if self._begun:
            await self._web.ask("DELETE", f"/episodes/{self._id}", within_s=_CLOSE_S)

    async def _ask(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        answer = await self._answer(path, body)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = answer[:80].decode(errors="replace")
            raise EpisodeError(f"env_error: {path} answered what is no {kind.__name__} ({error}): {shown}") from error

    async def _answer(self, path: str, body: dict[str, Any]) -> bytes:
        for again in range(self._retries + 1):
            try:
                return await self._web.ask("POST", path, body, within_s=self._try_s)
            except EngineError as error:
                why = error.rule
                may_be_tried = isinstance(error, Lost) or (isinstance(error, Refused) and error.status in _AGAIN)
                if not may_be_tried or again == self._retries:
                    break
                log.debug("%s%s: %s; again", self._web.url, path, why)
                await asyncio.sleep(_PAUSE_S * 2**again)
        raise EpisodeError(f"env_error: {self._web.url}{path} {why}")
