"""The reward `reasoning_gym`: the score that a generator's own scorer gives."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from astraflow.answers import last_boxed
from astraflow.errors import Problem
from astraflow.processes.pool import ProcessPool
from astraflow.processes.records import CallFailed, Settings
from astraflow.rewards.asking import Asking
from astraflow.types import Outcome, Task

_HOST = "astraflow.sources.gym.host:Host"  # makes entries as the source did
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_EXTRACTS = ("whole", "boxed", "tags")
_MEMORY_BYTES = 4 << 30


class ReasoningGym:
    """From 0 to 1 for an answer to a task of the source `reasoning_gym`. The task's own answer gets 1 at once,
    none gets 0; others are scored in a process that is killed at a deadline, and are unscored then, never 0.

    Metrics: `success` (a score of 1), `answered`; where unscored, `unscored_<why>`: deadline, lost, raised, start.
    """

    def __init__(
        self, *, extract: Literal["whole", "boxed", "tags"] = "whole", processes: int = 2, deadline_s: float = 5.0,
        max_chars: int = 4000,
    ) -> None:  # fmt: skip
        r"""`extract`: the answer is the whole reply, what the last `\boxed{}` holds, or what stands between the last
        `<answer>` and `</answer>`. `processes`: at most, in each worker process. `deadline_s`: of one score.
        `max_chars`: a longer answer gets 0. Raises: Problem: the package is missing, or a setting is out of range."""
        where = "workflow.reward"
        if extract not in _EXTRACTS:
            raise Problem(f"{where}.extract", extract, "is not known", f"use one of {', '.join(_EXTRACTS)}")
        for name, value in (("processes", processes), ("deadline_s", deadline_s), ("max_chars", max_chars)):
            if value <= 0:
                raise Problem(f"{where}.{name}", value, "must be above 0", "leave it out for the default")
        if find_spec("reasoning_gym") is None:
            raise Problem(
                f"{where}.type", "reasoning_gym", "needs the package reasoning-gym, which is not installed",
                "pip install 'astraflow[reasoning-gym]'; one of its packages needs a C compiler",
            )  # fmt: skip
        self._extract, self._max_chars = extract, max_chars
        self._asking = Asking(_shared(processes, deadline_s), "score")
        self.pool = self._asking.pool

    def __call__(self, completion: str, task: Task) -> Outcome | Awaitable[Outcome] | None:
        generator, number = task.get("generator"), task.get("number")
        if not isinstance(generator, str) or not isinstance(number, int):
            return None
        answer = self._answer_in(completion)
        if not answer or len(answer) > self._max_chars:
            return Outcome(reward=0.0, metrics={"success": 0.0, "answered": float(bool(answer))})
        if answer == task.get("answer"):
            return Outcome(reward=1.0, metrics={"success": 1.0, "answered": 1.0})
        return self._scored(generator, number, answer)

    def _answer_in(self, completion: str) -> str:
        if self._extract == "boxed":
            return last_boxed(completion) or ""
        if self._extract == "tags":
            found = _TAGS.findall(completion)
            return str(found[-1]).strip() if found else ""
        return completion.strip()

    async def _scored(self, generator: str, number: int, answer: str) -> Outcome:
        try:
            score = await self._asking.verdict(generator, number, answer)
        except CallFailed as error:
            return Outcome(metrics={f"unscored_{error.kind}": 1.0, "answered": 1.0})
        return Outcome(reward=score, metrics={"success": float(score >= 1.0), "answered": 1.0})


@lru_cache(maxsize=8)
def _shared(processes: int, deadline_s: float) -> ProcessPool:
    """The one pool of this process with these settings."""
    settings = Settings(processes=processes, deadline_s=deadline_s, memory_bytes=_MEMORY_BYTES)
    return ProcessPool("reasoning_gym", _HOST, settings=settings, clean=True)
