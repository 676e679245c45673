"""Environments that live in processes: several in each, one step at a time, killed with their process at a deadline."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from astraflow.config.rooms import choose
from astraflow.contracts import Environment
from astraflow.errors import EpisodeError
from astraflow.processes.pool import ProcessPool, Seat
from astraflow.processes.records import CallFailed, Settings
from astraflow.types import Action, Message, Step, Task

DEFAULTS: Mapping[str, Any] = {"seats": 8, "recycle_after": 100}
_numbers = itertools.count()


class Host:
    """In the process: the environments of its seats, by number. What crosses is JSON."""

    def __init__(self, *, spec: dict[str, Any]) -> None:
        self._chosen = choose("environments", spec, "environment")
        self._living: dict[int, Environment] = {}
        self._loop = asyncio.new_event_loop()

    def reset(self, number: int, task: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
        """A Step as a dict, or what `Environment.reset` gives otherwise; and the tools."""
        world = self._living[number] = self._chosen.make()
        said = msgspec.to_builtins(self._done(world.reset(msgspec.convert(task, Task))))
        return said, world.tools

    def step(self, number: int, action: dict[str, Any]) -> Any:
        """A Step as a dict."""
        return msgspec.to_builtins(self._done(self._living[number].step(msgspec.convert(action, Action))))

    def close(self, number: int) -> None:
        """Closing what was never opened is no error."""
        if (world := self._living.pop(number, None)) is not None:
            self._done(world.close())

    def _done(self, result: Any) -> Any:
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result


def pool_of(spec: Mapping[str, Any], name: str, settings: Settings) -> ProcessPool:
    """Processes that make environments of `spec`."""
    return ProcessPool(f"environment {name}", f"{__name__}:Host", {"spec": dict(spec)}, settings)


class Pooled(Environment):
    """The environment of one seat, as the workflow sees it. Its deadlines do not count the waiting for a process."""

    def __init__(self, pool: ProcessPool, timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._tools: list[dict[str, Any]] = []
        self._seat: Seat | None = None
        self._number = next(_numbers)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    async def reset(self, task: Task) -> str | list[Message] | Step:
        self._seat = await self._pool.seat()
        said, self._tools = await self._call("reset", msgspec.to_builtins(task))
        return _step(said) if isinstance(said, dict) else said

    async def step(self, action: Action) -> Step:
        return _step(await self._call("step", msgspec.to_builtins(action)))

    async def close(self) -> None:
        if self._seat is None:
            return
        try:
            await self._seat.call("close", self._number, deadline_s=self._timeout_s)
        except CallFailed as error:
            if error.kind == "raised":
                raise
        finally:
            self._seat.release()

    async def _call(self, method: str, argument: Any) -> Any:
        assert self._seat is not None
        try:
            return await self._seat.call(method, self._number, argument, deadline_s=self._timeout_s)
        except CallFailed as error:
            kind = "env_timeout" if error.kind == "deadline" else "env_error"
            hint = "; see workflow.env_timeout_s" if error.kind == "deadline" else ""
            raise EpisodeError(f"{kind}: {error}{hint}") from error


def _step(said: Any) -> Step:
    try:
        return msgspec.convert(said, Step, strict=False)
    except msgspec.ValidationError as error:
        raise EpisodeError(
            f"env_error: it gave {type(said).__name__}, not an astraflow.types.Step ({error})"
        ) from error
