"""The reward `math`."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from astraflow.answers import last_boxed
from astraflow.errors import Problem
from astraflow.processes.pool import ProcessPool
from astraflow.processes.records import CallFailed, Settings
from astraflow.rewards.asking import Asking
from astraflow.rewards.math.forms import same
from astraflow.rewards.numbers import final_number
from astraflow.types import Outcome, Task

MAX_GOLD_CHARS = 4000
_MEMORY_BYTES = 2 << 30
_RECYCLE_AFTER = 20_000  # sympy keeps what it met


class Math:
    r"""1.0 when the answer in the last `\boxed{}` is the task's, in any usual form, else 0.

    Compared as written where that decides, else by math-verify in a process that is killed at a deadline. What it could
    not decide is unscored, never 0. Metrics: `success`; `answered` (there was a box); `verified` (1: by algebra, 0: as
    written); where unscored, `unscored_<why>`: deadline, lost, raised, start, or gold (the task's own answer cannot be
    read).
    """

    def __init__(
        self, *, field: str = "answer", extract: Literal["boxed", "anywhere"] = "boxed", verify: bool = True,
        processes: int = 2, deadline_s: float = 3.0, max_chars: int = 1000,
    ) -> None:  # fmt: skip
        r"""`field`: where the task keeps its answer. `extract`: "anywhere": without a box, what follows the last `####`
        or "answer is", else the last number. `verify`: False: what cannot be decided as written is wrong, and
        math-verify is not needed. `processes`: at most, in each worker process. `deadline_s`: of one verification.
        `max_chars`: a longer answer is wrong. Raises: Problem: math-verify is missing, or a setting is out of range.
        """
        where = "workflow.reward"
        if extract not in ("boxed", "anywhere"):
            raise Problem(f"{where}.extract", extract, "is not known", "use 'boxed' or 'anywhere'")
        for name, value in (("processes", processes), ("deadline_s", deadline_s), ("max_chars", max_chars)):
            if value <= 0:
                raise Problem(f"{where}.{name}", value, "must be above 0", "leave it out for the default")
        if verify and find_spec("math_verify") is None:
            raise Problem(
                f"{where}.type", "math", "needs the package math-verify, which is not installed",
                "pip install 'astraflow[math]', or set verify = false to compare answers only as they are written",
            )  # fmt: skip
        self._field, self._boxed_only, self._max_chars = field, extract == "boxed", max_chars
        self.pool = _shared(processes, deadline_s) if verify else None
        self._asking = Asking(self.pool, "verify") if self.pool is not None else None

    def __call__(self, completion: str, task: Task) -> Outcome | Awaitable[Outcome] | None:
        gold = task.get(self._field)
        if gold is None or isinstance(gold, bool) or not str(gold).strip():
            return None
        return self.compare(str(gold), self.answer_in(completion))

    def answer_in(self, completion: str) -> str | None:
        """The answer that a reply gives."""
        found = last_boxed(completion)
        if found is None and not self._boxed_only:
            number, _ = final_number(completion)
            return None if number is None else format(number, "f")
        return found

    def compare(self, gold: str, answer: str | None) -> Outcome | Awaitable[Outcome]:
        """At once where the forms decide."""
        if answer is None:
            return Outcome(reward=0.0, metrics={"success": 0.0, "answered": 0.0, "verified": 0.0})
        if len(gold) > MAX_GOLD_CHARS:
            return Outcome(metrics={"unscored_gold": 1.0, "answered": 1.0})
        right = len(answer) <= max(self._max_chars, len(gold)) and same(gold, answer)
        if right is None and self._asking is not None:
            return self._verified(self._asking, gold, answer)
        return _outcome(bool(right), verified=False)

    async def _verified(self, asking: Asking, gold: str, answer: str) -> Outcome:
        try:
            verdict = await asking.verdict(gold, answer)
        except CallFailed as error:
            return Outcome(metrics={f"unscored_{error.kind}": 1.0, "answered": 1.0, "verified": 1.0})
        if verdict == "gold":
            return Outcome(metrics={"unscored_gold": 1.0, "answered": 1.0, "verified": 1.0})
        return _outcome(verdict == "right", verified=True)


def _outcome(right: bool, *, verified: bool) -> Outcome:
    metrics = {"success": float(right), "answered": 1.0, "verified": float(verified)}
    return Outcome(reward=float(right), metrics=metrics)


@lru_cache(maxsize=8)
def _shared(processes: int, deadline_s: float) -> ProcessPool:
    """The one pool of this process with these settings."""
    settings = Settings(
        processes=processes, deadline_s=deadline_s, memory_bytes=_MEMORY_BYTES, recycle_after=_RECYCLE_AFTER
    )
    return ProcessPool("math", "astraflow.rewards.math.verifier:Verifier", settings=settings, clean=True)
