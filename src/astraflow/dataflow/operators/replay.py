"""An operator that lets trained groups take part in later batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.types import Stored

Selector = Literal["latest", "priority", "stratified"]


class Replay(Operator):
    """Trains groups again: a share `ratio` of every batch is taken from trained groups, as far as there are any.

    The share is exact over steps: floor(v * ratio * groups) groups until step v, less those until the first one. For
    groups that have to give way to fresh ones the service selects others later. A task counts as trained by its first
    training; further uses are counted as replayed. What is older than `batch.max_staleness`, or than `max_age`
    versions, takes no part.
    Args: size: groups kept. max_uses: how often one group is trained at most, its first time included.
    selector: what is kept and taken first. latest: newest weight version, then fewest uses. priority: largest mean
        absolute advantage, then latest (as in prioritized experience replay, arXiv:1511.05952, without its sampling:
        the first ones are taken). stratified: one source after the other in turn, latest first within each.
    """

    phase = "weight"
    makes = ("replay",)

    def __init__(
        self,
        *,
        ratio: float = 0.3,
        size: int = 64,
        selector: Selector = "latest",
        max_age: int | None = None,
        max_uses: int = 2,
    ) -> None:
        require(0 < ratio < 1, "replay.ratio", ratio, "must be > 0 and < 1", "use 0.3; without replay leave it out")
        require(size >= 1, "replay.size", size, "must be >= 1", "use a few batches, as 64")
        known = ("latest", "priority", "stratified")
        require(selector in known, "replay.selector", selector, "is not known", f"use one of {', '.join(known)}")
        require(max_age is None or max_age >= 0, "replay.max_age", max_age, "must be >= 0", "use batch.max_staleness")
        require(max_uses >= 2, "replay.max_uses", max_uses, "must be >= 2, the first time included", "use 2")
        self._ratio, self._size, self._selector, self._max_uses = ratio, size, selector, max_uses
        self.max_age = max_age

    def select(self, stored: Sequence[Stored], groups: int, step: int) -> list[str]:
        wanted = math.floor(step * self._ratio * groups) - math.floor((step - 1) * self._ratio * groups)
        usable = self._usable(stored, step - 1)
        return [s.group_id for s in self._ranked(usable, step)[: min(wanted, groups - 1)]]

    def retain(self, stored: Sequence[Stored], step: int) -> list[str]:
        return [s.group_id for s in self._ranked(self._usable(stored, step), step)[: self._size]]

    def _usable(self, stored: Sequence[Stored], version: int) -> list[Stored]:
        """Those that may be trained by a trainer at `version`."""
        oldest = version - self.max_age if self.max_age is not None else 0
        return [s for s in stored if s.uses < self._max_uses and s.min_version >= oldest]

    def _ranked(self, stored: list[Stored], step: int) -> list[Stored]:
        """Best first; equals in the order given."""
        ranked = sorted(stored, key=lambda s: (-s.min_version, s.uses, -s.step))
        match self._selector:
            case "priority":
                return sorted(ranked, key=lambda s: -s.mean_abs_advantage)
            case "stratified":
                return _in_turn(ranked, step)
            case _:
                return ranked


def _in_turn(ranked: list[Stored], step: int) -> list[Stored]:
    """One of each source at a time; the source that begins changes from step to step."""
    by_source: dict[str, list[Stored]] = {name: [] for name in sorted({s.source for s in ranked})}
    for item in ranked:
        by_source[item.source].append(item)
    names = list(by_source)
    first = step % max(len(names), 1)
    turns = [
        (place, turn, item)
        for turn, name in enumerate(names[first:] + names[:first])
        for place, item in enumerate(by_source[name])
    ]
    return [item for _, _, item in sorted(turns, key=lambda t: t[:2])]
