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

from astraflow.config.rooms import Chosen, choose
from astraflow.contracts import Environment
from astraflow.environments.health import Health
from astraflow.errors import EpisodeError, Problem
from astraflow.types import Action, Message, Step, Task

log = logging.getLogger("astraflow.environment")
FLAGS = ("cheap", "cpu", "box", "service", "judge")
ENV_TIMEOUT_S = 30.0
_SLOW_S = 0.05  # of a step on the event loop, which all episodes of a worker share
_CLOSE_S = 10.0


class Worlds:
    """Makes the environments of a workflow."""

    def __init__(
        self, spec: str | Mapping[str, Any], where: str = "workflow.environment", *, sides: int = 1,
        env_timeout_s: float = ENV_TIMEOUT_S,
    ) -> None:  # fmt: skip
        """`env_timeout_s`: deadline of `reset` and of each `step`.

        Raises: Problem or ConfigError: no such environment or option, one that cannot work here, or of other sides.
        """
        self._chosen, self._timeout_s = choose("environments", spec, where), env_timeout_s
        sample = cast(Environment, self._chosen.make())
        self.tools, self.flag = list(sample.tools), sample.runs
        _check(sample, self._chosen, where, sides)
        if env_timeout_s <= 0:
            raise Problem(
                "workflow.env_timeout_s", env_timeout_s, "must be > 0", "give the seconds that a step may take"
            )
        self.health = Health(self._chosen.type)

    def open(self) -> World:
        """An environment for one episode. Raises: EpisodeError: it could not be made."""
        try:
            return World(cast(Environment, self._chosen.make()), self._timeout_s, self.health)
        except Exception as error:
            raise _failed("it could not be made", error) from error


class World:
    """One environment. `close` it, whatever happened. What goes wrong is an EpisodeError: env_error, env_timeout."""

    def __init__(self, environment: Environment, env_timeout_s: float, health: Health) -> None:
        self._environment, self._timeout_s, self._health = environment, env_timeout_s, health
        self._num_steps = 0
        self.tools = list(environment.tools)
        health.started()

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
            raise EpisodeError(
                f"env_timeout: {what} of {self._health.name} took longer than {self._timeout_s:g} s; see workflow.env_timeout_s"
            ) from None
        except EpisodeError:
            self._health.failed()
            raise
        except Exception as error:
            self._health.failed()
            raise _failed(what, error) from error
        self._health.stepped(time.monotonic() - began)
        return result


def _failed(what: str, error: Exception) -> EpisodeError:
    return EpisodeError(f"env_error: {what}: {type(error).__name__}: {error}")


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
