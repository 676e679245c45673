"""Numbers that tasks of environments are made from: `{seed: 17}`."""

from __future__ import annotations

from typing import Any

from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, digest


class SeedsSource:
    """Row i is `{seed: first + i}`, with `fields`."""

    def __init__(self, *, size: int = 1000, first: int = 0, fields: dict[str, Any] | None = None) -> None:
        """`first`: held-out tasks are those of other numbers. `fields`: what every task has beside its seed."""
        if size < 1:
            raise SourceError("sources.seeds.size", size, "must be >= 1", "give how many tasks one epoch has")
        if first < 0:
            raise SourceError("sources.seeds.first", first, "must be >= 0", "use 0")
        self._size, self._first, self._fields = size, first, dict(fields or {})

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.seeds", index, self._size)
        return {**self._fields, "seed": self._first + index}

    def fingerprint(self) -> str:
        return digest("seeds", 1, self._first, self._size, sorted(self._fields.items()))
