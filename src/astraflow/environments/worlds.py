"""Environments at work: one for each episode, every step with a deadline, what fails as the error of the episode.

| flag                | its steps run                                   | after the deadline                          |
|---------------------|-------------------------------------------------|---------------------------------------------|
| cheap               | here, on the event loop                         | the worker is killed, as any that blocks    |
| cpu                 | in a process of the pool                        | that process is killed and replaced         |
| box, service, judge | here, as coroutines that wait for somebody else | the wait ends; `close` is called            |
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from astraflow.config.rooms import Chosen, choose
from astraflow.config.sections.structs import struct_of
from astraflow.contracts import Environment
from astraflow.environments.health import Health
from astraflow.environments.pooled import DEFAULTS, Pooled, pool_of
from astraflow.errors import EpisodeError, Problem, place_of
from astraflow.processes.pool import ProcessPool
from astraflow.processes.records import Settings
from astraflow.types import Action, Message, Step, Task, error_kind

log = logging.getLogger("astraflow.environment")
FLAGS = ("cheap", "cpu", "box", "service", "judge")
ENV_TIMEOUT_S = 30.0
_SLOW_S = 0.05  # of a step on the event loop, which all episodes of a worker share
_CLOSE_S = 10.0


class Worlds:
    """Makes the environments of a workflow."""

    def __init__(
        self, spec: str | Mapping[str, Any], where: str = "workflow.environment", *, sides: int = 1,
        env_timeout_s: float = ENV_TIMEOUT_S, pool: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`env_timeout_s`: deadline of `reset` and of each `step`. `pool`: `astraflow.processes.records.Settings` of
        the processes of an environment that runs as "cpu".

        Raises: Problem or ConfigError: no such environment or option, one that cannot work here, or of other sides.
        """
        self._chosen, self._timeout_s = choose("environments", spec, where), env_timeout_s
        sample = cast(Environment, self._chosen.make())
        self.flag, self.sides = sample.runs, sample.sides
        _check(sample, self._chosen, where, sides)
        if env_timeout_s <= 0:
            raise Problem(
                "workflow.env_timeout_s", env_timeout_s, "must be > 0", "give the seconds that a step may take"
            )
        self.health = Health(self._chosen.type)
        self._pool: ProcessPool | None = None
        if self.flag == "cpu":
            whole = {"type": spec} if isinstance(spec, str) else spec
            self._pool = pool_of(whole, self._chosen.type, _settings(pool or {}, env_timeout_s))
        elif pool:
            why = f"has no effect, as {self._chosen.type} runs as {self.flag!r}"
            raise Problem("workflow.pool", pool, why, "leave it out")

    def open(self) -> World:
        """An environment for one episode. Raises: EpisodeError: it could not be made."""
        if self._pool is not None:
            return World(Pooled(self._pool, self._timeout_s), None, self.health)
        try:
            return World(cast(Environment, self._chosen.make()), self._timeout_s, self.health)
        except Exception as error:
            raise _failed("it could not be made", error) from error

    def close(self) -> None:
        """End its processes, if it has any; they end with this one anyway."""
        if self._pool is not None:
            self._pool.close()


class World:
    """One environment. `close` it, whatever happened. What goes wrong is an EpisodeError: env_error, env_timeout."""

    def __init__(self, environment: Environment, timeout_s: float | None, health: Health) -> None:
        """`timeout_s`: None where the environment keeps its deadlines itself."""
        self._environment, self._timeout_s, self._health = environment, timeout_s, health
        self._num_steps = 0
        health.started()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Its tools, after `reset`."""
        return list(self._environment.tools)

    async def reset(self, task: Task) -> tuple[list[Message], int]:
        """The opening messages, and which side they are for."""
        said = await self._within("reset", lambda: self._environment.reset(task))
        if isinstance(said, Step):
            return [{"role": "user", "content": said.text}], said.side
        if isinstance(said, str):
            return [{"role": "user", "content": said}], 0
        if isinstance(said, Sequence) and all(isinstance(m, Mapping) for m in said):
            return [dict(m) for m in said], 0
        raise EpisodeError(f"env_error: reset returned {type(said).__name__}; return a text, messages, or a Step")

    async def step(self, action: Action) -> Step:
        """What comes of one action."""
        self._num_steps += 1
        step = await self._within(f"step {self._num_steps}", lambda: self._environment.step(action))
        if not isinstance(step, Step):
            raise EpisodeError(f"env_error: step returned {type(step).__name__}, not an astraflow.types.Step")
        return step

    async def close(self) -> None:
        """Release it. What fails now is logged: the episode is over."""
        self._health.ended()
        try:
            async with asyncio.timeout(_CLOSE_S):
                ending = self._environment.close()
                if inspect.isawaitable(ending):
                    await ending
        except Exception as error:
            log.warning("%s: close failed: %s: %s", self._health.name, type(error).__name__, error)

    async def _within(self, what: str, act: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                result = act()
                if inspect.isawaitable(result):
                    result = await result
                elif time.monotonic() - began > _SLOW_S:
                    self._health.slow(what, time.monotonic() - began)
        except TimeoutError as error:
            if not limit.expired():
                raise _failed(what, error) from error
            self._health.late()
            what = f"{what} of {self._health.name} took longer than {self._timeout_s:g} s"
            raise EpisodeError(f"env_timeout: {what}; see workflow.env_timeout_s") from None
        except EpisodeError as error:
            late = error_kind(str(error)) == "env_timeout"
            (self._health.late if late else self._health.failed)()
            raise
        except Exception as error:
            self._health.failed()
            raise _failed(what, error) from error
        self._health.stepped(time.monotonic() - began)
        return result


def _settings(pool: Mapping[str, Any], deadline_s: float) -> Settings:
    if "deadline_s" in pool:
        raise Problem("workflow.pool.deadline_s", pool["deadline_s"], "is not used", "set workflow.env_timeout_s")
    return replace(struct_of(Settings, {**DEFAULTS, **pool}, "workflow.pool", "a pool"), deadline_s=deadline_s)


def _failed(what: str, error: Exception) -> EpisodeError:
    return EpisodeError(f"env_error: {what}: {type(error).__name__}: {error}{place_of(error)}")


def _check(sample: Environment, chosen: Chosen, where: str, sides: int) -> None:
    kind = f"{where}.type"
    if sample.runs not in FLAGS:
        raise Problem(kind, chosen.type, f"has runs={sample.runs!r}", f"use one of: {', '.join(FLAGS)}")
    if sample.runs in FLAGS[2:] and not inspect.iscoroutinefunction(sample.step):
        raise Problem(
            kind, chosen.type, f"has runs={sample.runs!r} and a step that would hold up all other episodes",
            "write `async def step`, or use runs='cpu'",
        )  # fmt: skip
    if sample.sides != sides:
        fit = "a workflow for one, such as tool_use" if sample.sides == 1 else "self_play"
        raise Problem(kind, chosen.type, f"has {sample.sides} sides, and this workflow plays {sides}", f"use {fit}")
