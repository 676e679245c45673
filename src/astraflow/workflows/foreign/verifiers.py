"""Tasksets of verifiers v1, as they are, in a Python environment of their own."""

from __future__ import annotations

import asyncio
import subprocess
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from astraflow.contracts import LLM
from astraflow.errors import Problem
from astraflow.types import Outcome, Task
from astraflow.workflows.foreign.side import Side
from astraflow.workflows.load import choose_policy
from astraflow.workflows.roles import ByRoles, at_least

INSTALL = "python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.0"
_LOOK_S = 60.0
_INSIDE = Path(__file__).with_name("inside.py")


class Verifiers(ByRoles):
    """An episode is a rollout of theirs: their harness calls the policy at this episode's endpoint, where each token is
    kept; their trace says the reward and the metrics. A rollout that ends with an error is an `env_error`.
    """

    def __init__(
        self, *, taskset: str, python: str, config: Mapping[str, Any] | None = None,
        harness: Mapping[str, Any] | None = None, runtime: Mapping[str, Any] | None = None, max_turns: int = 0,
        field: str = "seed", limit: int = 10_000, start_s: float = 120.0, policy: str | None = None,
    ) -> None:  # fmt: skip
        """`taskset`: its id, a module; the directory of the run is searched first. `python`: of an environment with
        verifiers. `config`: of the taskset. `harness`, `runtime`: theirs; null and subprocess. `max_turns`: 0: no
        limit. `field`: of our task, the number of theirs. `limit`: tasks of an endless taskset.

        Raises: Problem: no such interpreter, or it has no verifiers.
        """
        super().__init__({"policy": policy} if policy is not None else {})
        at_least("max_turns", max_turns, 0, "use 0 for no limit")
        at_least("limit", limit, 1, "give how many tasks of an endless taskset are used")
        _look_at(python)
        begin = {
            "taskset": taskset, "config": dict(config or {}), "harness": dict(harness or {"id": "null"}),
            "runtime": dict(runtime or {"type": "subprocess"}), "max_turns": max_turns, "limit": limit,
        }  # fmt: skip
        self._argv = [python, str(_INSIDE), msgspec.json.encode(begin).decode()]
        self._field, self._start_s, self._policy = field, start_s, policy
        self._sides: weakref.WeakKeyDictionary[Any, Side] = weakref.WeakKeyDictionary()

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        client = choose_policy(llm, self._policy)
        model = self._policy or next(iter(llm))
        loop = asyncio.get_running_loop()
        side = self._sides.get(loop) or self._sides.setdefault(loop, Side(self._argv, self._start_s))
        number = int(task.get(self._field, task.row))
        told = await side.play({"task": number, "url": client.base_url, "key": client.api_key, "model": model})
        return Outcome(reward=told.reward, metrics=told.metrics)


def _look_at(python: str) -> None:
    look = "from importlib.metadata import version as v; print(v('verifiers'))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", look], capture_output=True, text=True, timeout=_LOOK_S, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Problem("workflow.python", python, f"cannot be started ({error})", f"make one: {INSTALL}") from error
    version = done.stdout.strip()
    if done.returncode or not version:
        raise Problem("workflow.python", python, "has no verifiers", f"make one that has: {INSTALL}")
    if tuple(map(int, version.split(".")[:2])) < (0, 4):
        raise Problem("workflow.python", python, f"has verifiers {version}, of an older form", f"renew it: {INSTALL}")
