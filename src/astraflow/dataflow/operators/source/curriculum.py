"""Goes from easy to hard tasks as the policy learns."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.dataflow.operators.source.outcomes import success_rate
from astraflow.errors import DataflowError
from astraflow.types import Group, SourceView, Task


class Curriculum(Operator):
    """Pools of rising difficulty by the task field `by`; the newest open pool is played until it is mastered.

    A task of the newest open pool is rolled out, one of an older pool with probability `keep`, one of a harder pool is
    skipped. When the mean success of the last `window` groups of the newest pool reaches `promote_at`, the next pool
    opens and the window starts empty. Pools stay open.
    Args: levels: values of the field, easiest first; or edges: rising numbers, where pool i holds the values from
    edges[i - 1] up to, and without, edges[i]. start: so many of the easiest pools are open at first, as one pool.
    threshold: reward that is a success where an episode has no metric "success".
    State: the newest pool, and up to `window` success rates.
    """

    place = "source"

    def __init__(
        self,
        *,
        by: str,
        levels: Sequence[Any] = (),
        edges: Sequence[float] = (),
        start: int = 1,
        promote_at: float = 0.7,
        window: int = 32,
        keep: float = 0.2,
        threshold: float = 1.0,
    ) -> None:
        require(
            bool(levels) != bool(edges), "curriculum.levels", levels, f"and edges={list(edges)}: give one of them",
            "levels = ['easy', 'hard'] for named pools, edges = [10, 100] for numbers",
        )  # fmt: skip
        require(len(set(levels)) == len(levels), "curriculum.levels", levels, "must all differ", "name each pool once")
        rising = all(a < b for a, b in itertools.pairwise(edges))
        require(rising, "curriculum.edges", edges, "must rise", "use [10, 100] for values below 10, 10 to 99, from 100")
        num_pools = len(levels) or len(edges) + 1
        require(1 <= start <= num_pools, "curriculum.start", start, f"must be from 1 to {num_pools}", "use 1")
        require(0 < promote_at <= 1, "curriculum.promote_at", promote_at, "must be in (0, 1]", "use 0.7")
        require(window >= 1, "curriculum.window", window, "must be >= 1", "use 32 groups")
        require(0 <= keep <= 1, "curriculum.keep", keep, "must be from 0 to 1", "use 0 to leave older pools behind")
        self._by, self._levels, self._edges = by, list(levels), [float(e) for e in edges]
        self._promote_at, self._window, self._keep, self._threshold = promote_at, window, keep, threshold
        self._start, self._last = start, num_pools - 1
        self._newest = start - 1
        self._recent: list[float] = []  # success of the latest groups of the newest pool

    def admit(self, task: Task, view: SourceView) -> float:
        pool = self._pool(task)
        if pool > self._newest:
            return 0.0
        return 1.0 if pool == self._newest else self._keep

    def on_result(self, group: Group) -> None:
        success = success_rate(group, self._threshold)
        if success is None or self._newest == self._last or self._pool(group.task) != self._newest:
            return
        self._recent = [*self._recent, success][-self._window :]
        if len(self._recent) == self._window and math.fsum(self._recent) / self._window >= self._promote_at:
            self._newest += 1
            self._recent = []

    def state_dict(self) -> dict[str, Any]:
        return {"newest": self._newest, "recent": self._recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._newest, self._recent = state["newest"], list(state["recent"])

    def _pool(self, task: Task) -> int:
        """The pool of a task; those that are open at the start count as one."""
        value = task.get(self._by)
        try:
            pool = self._levels.index(value) if self._levels else bisect.bisect_right(self._edges, float(value))
        except (TypeError, ValueError) as error:
            known = ", ".join(map(repr, self._levels)) if self._levels else "numbers"
            raise DataflowError(
                f"sources.{task.source} row {task.row} {self._by}", repr(value), f"belongs to no pool of {known}",
                "mend the row, or add the value to curriculum.levels",
            ) from error  # fmt: skip
        return max(pool, self._start - 1)
