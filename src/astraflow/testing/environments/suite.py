"""`check_environment`: public, for yours as for ours."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from astraflow.config.env import child_environment
from astraflow.environments.worlds import Worlds
from astraflow.errors import EpisodeError
from astraflow.testing.environments.again import Asked
from astraflow.testing.environments.playing import Played, Policy, at_random, digest, nothing, play, replay
from astraflow.types import Action, Task

RUBBISH = (
    Action(text=""),
    Action(text="\x00 \N{ROBOT FACE} " + "x" * 10_000),
    Action(text="cut off", finish_reason="length"),
    Action(tool="no_such_tool", arguments={"x": [None, {"y": 1e300}]}),
    Action(tool="", arguments={}),
)
_AGAIN_S = 120.0
Best = float | Callable[[Mapping[str, Any]], float]


class Report(NamedTuple):
    """Mean rewards."""

    oracle: float | None  # None: no oracle was given
    null: float
    random: float
    digest: str  # of what the random policy was told


def check_environment(
    environment: str | Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], *, oracle: Policy | None = None,
    actions: Sequence[str] = (), best: Best = 1.0, null: float | None = 0.0, max_turns: int = 64, sides: int = 1,
) -> Report:  # fmt: skip
    """Play `tasks` (their fields) by an oracle, by a policy that says nothing, and at random.

    Args: environment: as in a run file. oracle: must earn `best` in each task, a number or a function of the task's
    fields. actions: texts that the random policy chooses from; it calls tools by their schema, too. null: what saying
    nothing must earn; None: anything.
    Raises: AssertionError: names everything that does not hold.
    """
    rows = [Task("check", row, 0, dict(fields)) for row, fields in enumerate(tasks)]
    assert rows, "give at least one task"
    worlds = Worlds(environment, sides=sides)
    try:
        return asyncio.run(_check(worlds, environment, rows, oracle, actions, best, null, max_turns, sides))
    finally:
        worlds.close()


def reward_of_chance(
    environment: str | Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], actions: Sequence[str] = (), *,
    max_turns: int = 64,
) -> float:  # fmt: skip
    """Mean reward of the random policy, to be written down: what a policy that learnt nothing earns."""
    rows = [Task("check", row, 0, dict(fields)) for row, fields in enumerate(tasks)]
    worlds = Worlds(environment)

    async def played() -> list[Played]:
        return [await play(worlds, task, partial(at_random, actions), max_turns) for task in rows]

    try:
        return _mean(asyncio.run(played()))
    finally:
        worlds.close()


async def _check(
    worlds: Worlds, spec: str | Mapping[str, Any], rows: Sequence[Task], oracle: Policy | None, actions: Sequence[str],
    best: Best, null: float | None, max_turns: int, sides: int,
) -> Report:  # fmt: skip
    wrong: list[str] = []
    by_oracle = [await play(worlds, task, lambda _: oracle, max_turns) for task in rows] if oracle else []
    for p in by_oracle:
        if not _is(p, most := best(p.task.fields) if callable(best) else best):
            wrong.append(f"the oracle earns {p.reward} of {most} in {p.task.fields}; say what it can earn by best=")
    by_null = [await play(worlds, task, lambda _: nothing, max_turns) for task in rows]
    wrong += [
        f"who says nothing earns {p.reward}; say what that is worth by null="
        for p in by_null if null is not None and not _is(p, null)
    ]  # fmt: skip
    by_chance = [await play(worlds, task, partial(at_random, actions), max_turns) for task in rows]
    everything = [*by_oracle, *by_null, *by_chance]
    wrong += _untold(everything)
    wrong += await _unsteady(worlds, everything, spec, sides)
    wrong += await _fragile(worlds, rows[0])
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    return Report(
        _mean(by_oracle) if by_oracle else None, _mean(by_null), _mean(by_chance), digest([p.steps for p in by_chance])
    )


def _is(played: Played, wanted: float) -> bool:
    return played.reward is not None and math.isclose(played.reward, wanted, abs_tol=1e-9)


def _mean(played: Sequence[Played]) -> float:
    return math.fsum(p.reward or 0.0 for p in played) / len(played)


def _untold(everything: Iterable[Played]) -> list[str]:
    """Steps that a policy or a report cannot read."""
    wrong = []
    for played in everything:
        if not played.steps[0].text:
            wrong.append(f"nothing is told at the start of {played.task.fields}")
        for step in played.steps:
            try:
                if msgspec.json.decode(msgspec.json.encode(step), type=type(step)) != step:
                    wrong.append(f"a step is not what JSON makes of it: {step}")
            except (TypeError, msgspec.MsgspecError, UnicodeEncodeError) as error:
                wrong.append(f"a step is no JSON ({error}): {step}")
            rewards = step.reward if isinstance(step.reward, list) else [step.reward]
            if not all(r is None or math.isfinite(r) for r in rewards):
                wrong.append(f"a reward is not finite: {step}")
    return wrong


async def _unsteady(worlds: Worlds, everything: list[Played], spec: str | Mapping[str, Any], sides: int) -> list[str]:
    """The same actions must tell the same: beside other episodes, in other processes, with other orders of sets."""
    wanted = digest([p.steps for p in everything])
    wrong = []
    if digest(await replay(worlds, everything)) != wanted:
        wrong.append("episodes of one process that take turns tell something else than one after another")
    asked = msgspec.json.encode(Asked(spec if isinstance(spec, str) else dict(spec), sides, everything))
    found = await asyncio.gather(*(asyncio.to_thread(_elsewhere, asked, seed) for seed in "12"))
    wrong += [f"another process (PYTHONHASHSEED={s}): {f}" for s, f in zip("12", found, strict=True) if f != wanted]
    return wrong


def _elsewhere(asked: bytes, hash_seed: str) -> str:
    paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
    env = child_environment(None, {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths})
    command = [sys.executable, "-m", "astraflow.testing.environments.again"]
    done = subprocess.run(command, input=asked, capture_output=True, env=env, timeout=_AGAIN_S, check=False)
    return done.stdout.decode() if done.returncode == 0 else done.stderr.decode()[-2000:]


async def _fragile(worlds: Worlds, task: Task) -> list[str]:
    """Whatever a policy does, it is told so; and an environment may be closed at any time, also at once."""
    wrong = []
    for action in RUBBISH:
        world = worlds.open()
        try:
            await world.reset(task)
            await world.step(action)
        except EpisodeError as error:
            shown = f"{action.text[:20]!r}" if action.tool is None else f"{action.tool!r}"
            wrong.append(f"the action {shown} is a failure of the environment: {error}")
        finally:
            await world.close()
    await worlds.open().close()
    return wrong
