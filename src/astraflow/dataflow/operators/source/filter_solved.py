"""Skips tasks that teach nothing any more, by the moving success rate of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.dataflow.operators.source.outcomes import success_rate
from astraflow.types import Group, SourceView, Task


class FilterSolved(Operator):
    """Skips a row whose moving success rate `m` is at least `above`, or at most `below`, after `min_visits` groups.

    Per row, over its groups: `m = s` at the first, then `m <- memory * m + (1 - memory) * s`, where s is the success
    rate of the group's scored episodes. With several policies a row is skipped only when it is so for each of them.
    Args: below: None: hopeless rows are kept. revisit: probability with which a row that would be skipped is rolled out
    all the same, so that it can come back. threshold: reward that is a success where an episode has no "success".
    State: a visit count up to `min_visits` and a rate per row that was played.
    """

    place = "source"

    def __init__(
        self,
        *,
        above: float = 0.9,
        below: float | None = None,
        min_visits: int = 2,
        revisit: float = 0.05,
        memory: float = 0.5,
        threshold: float = 1.0,
    ) -> None:
        require(0 < above <= 1, "filter_solved.above", above, "must be in (0, 1]", "use 1 for always solved")
        require(
            below is None or 0 <= below < above, "filter_solved.below", below, f"must be from 0 to above ({above})",
            "leave it out to keep hopeless tasks",
        )  # fmt: skip
        require(min_visits >= 1, "filter_solved.min_visits", min_visits, "must be >= 1", "use 2")
        require(0 <= revisit < 1, "filter_solved.revisit", revisit, "must be in [0, 1)", "use 0.05")
        require(0 <= memory < 1, "filter_solved.memory", memory, "must be in [0, 1)", "use 0 for the last group only")
        self._above, self._below, self._min_visits = above, below, min_visits
        self._revisit, self._memory, self._threshold = revisit, memory, threshold
        self._rates: dict[str, dict[int, tuple[int, float]]] = {}  # policy -> row -> (visits, m)

    def admit(self, task: Task, view: SourceView) -> float:
        seen = [rows[task.row] for rows in self._rates.values() if task.row in rows]
        return self._revisit if seen and all(self._dull(*row) for row in seen) else 1.0

    def on_result(self, group: Group) -> None:
        success = success_rate(group, self._threshold)
        if success is None:
            return
        rows = self._rates.setdefault(group.policy, {})
        visits, rate = rows.get(group.task.row, (0, success))
        rate = self._memory * rate + (1.0 - self._memory) * success
        rows[group.task.row] = (min(visits + 1, self._min_visits), rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            policy: {
                "rows": list(rows),
                "visits": [v for v, _ in rows.values()],
                "rates": [m for _, m in rows.values()],
            }
            for policy, rows in self._rates.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = {
            policy: dict(zip(x["rows"], zip(x["visits"], x["rates"], strict=True), strict=True))
            for policy, x in state.items()
        }

    def _dull(self, visits: int, rate: float) -> bool:
        if visits < self._min_visits:
            return False
        return rate >= self._above or (self._below is not None and rate <= self._below)
