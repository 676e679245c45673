"""The rows of one policy that rules look at: the newest ones and the first few."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from astraflow.config.schema import RunConfig

WINDOW = 20  # steps
FIRST = 5  # steps at the start that later ones are compared with
RECENT = 5  # steps of which a mean must be bad: one bad batch is no trend

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """What the run file says of a policy that rules must know."""

    loss: str
    advantage: str
    max_staleness: int
    max_logprob_gap: float
    tokens_per_microbatch: int

    @classmethod
    def of(cls, config: RunConfig) -> dict[str, Limits]:
        """Of every policy."""
        return {
            name: cls(
                loss=policy.algorithm.loss.type,
                advantage=policy.algorithm.advantage.type,
                max_staleness=policy.batch.max_staleness,
                max_logprob_gap=policy.trainer.max_logprob_gap,
                tokens_per_microbatch=policy.batch.tokens_per_microbatch,
            )
            for name, policy in config.trained.items()
        }  # fmt: skip


class Window:
    """The steps that rules look at."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.count = 0
        self._first: list[Row] = []
        self._last: deque[Row] = deque(maxlen=WINDOW)

    def add(self, row: Row) -> None:
        """The next step."""
        self.count += 1
        self._last.append(row)
        if len(self._first) < FIRST:
            self._first.append(row)

    def recent(self, name: str, default: float = np.nan) -> float:
        """Mean over the last steps; `default` where none of them has it."""
        return _mean(list(self._last)[-RECENT:], name, default)

    def earlier(self, name: str, default: float = np.nan) -> float:
        """Median over the steps of the window before the recent ones."""
        values = _values(list(self._last)[:-RECENT], name)
        return float(np.median(values)) if values else default

    def first(self, name: str, default: float = np.nan) -> float:
        """Mean over the first steps of the run."""
        return _mean(self._first, name, default)

    def newest(self, name: str, default: float = 0.0) -> float:
        """Of the last step."""
        return _mean([self._last[-1]], name, default)

    def growth(self, name: str) -> float:
        """Of a counter over the recent steps, or of all of them below `name/`; one that is new has grown from 0."""
        if self.count < 2:
            return 0.0
        old, new = list(self._last)[-RECENT - 1 :][0], self._last[-1]
        names = [each for each in new if each == name or (name.endswith("/") and each.startswith(name))]
        return sum(float(new[each] or 0.0) - float(old.get(each) or 0.0) for each in names)


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [float(value) for row in rows if isinstance(value := row.get(name), int | float)]


def _mean(rows: Iterable[Row], name: str, default: float) -> float:
    values = _values(rows, name)
    return sum(values) / len(values) if values else default
