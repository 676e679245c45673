"""What rows read in one pass: one token each of those that decode, and a part of what others have yet to read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from astraflow.engines.local.rows import Rows


@dataclass(slots=True)
class Reading:
    """Rows `rows` (ascending) read their tokens at positions `starts` to `stops`, all [m]."""

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    twins: dict[int, list[int]] = field(default_factory=dict)  # row -> rows with the same tokens, which need not read

    @property
    def counts(self) -> np.ndarray:
        """[m] tokens."""
        counts: np.ndarray = self.stops - self.starts
        return counts


def reading_of(rows: Rows, upto: np.ndarray, budget: int) -> Reading:
    """Every row that has one token to read up to position `upto` ([n]) reads it; of those that have more, `budget`
    tokens are read in all: half of them of the row that came first, the others where the least is missing."""
    stored = rows.records["stored"]
    need = upto - stored
    granted = np.where(need == 1, 1, 0)
    twins: dict[int, list[int]] = {}
    many = np.flatnonzero(need > 1).tolist()
    if many:
        many.sort(key=lambda row: int(rows.records["turn"][row]))
        leaders, twins = _leaders(rows, many)
        first, left = leaders[0], budget
        if len(leaders) > 1:
            granted[first] = min(int(need[first]), max(1, budget // 2))
            left -= int(granted[first])
        for row in sorted(leaders[1:], key=lambda row: int(need[row])):
            granted[row] = min(int(need[row]), max(0, left))
            left -= int(granted[row])
        granted[first] += min(int(need[first] - granted[first]), max(0, left))
    chosen = np.flatnonzero(granted)
    return Reading(chosen, stored[chosen], stored[chosen] + granted[chosen], twins)


def _leaders(rows: Rows, many: list[int]) -> tuple[list[int], dict[int, list[int]]]:
    """One row of each set that has the same tokens of one policy and has read as many of them; and the others of
    each."""
    first: dict[tuple[int, int, bytes], int] = {}
    twins: dict[int, list[int]] = {}
    for row in many:
        record = rows.records[row]
        leader = first.setdefault((int(record["policy"]), int(record["stored"]), rows.ids(row).tobytes()), row)
        if leader != row:
            twins.setdefault(leader, []).append(row)
    return list(first.values()), twins
