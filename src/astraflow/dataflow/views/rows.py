"""metrics.jsonl: one row per acknowledged step and per evaluation round; the dataflow service is its only writer."""

from __future__ import annotations

import os
from pathlib import Path

from astraflow.dataflow.machine.commands import MetricsRow
from astraflow.observe.jsonl import JsonlWriter, read_jsonl


class MetricsFile:
    """Appends rows `{kind, policy, step, time_s, <metric>: <number>, ...}`, each at most once.

    After a crash the journal is replayed, and rows whose writing was cut off are written then.
    """

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._keys = {_key(row) for row in read_jsonl(path)}
        self._writer = JsonlWriter(path)

    def append(self, row: MetricsRow, more: dict[str, float] | None = None) -> None:
        """Write one row, with metrics that only the service knows."""
        record = {"kind": row.kind, "policy": row.policy, "step": row.step, "time_s": round(row.time_s, 3)}
        if _key(record) not in self._keys:
            self._keys.add(_key(record))
            self._writer.append({**record, **(more or {}), **row.metrics})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _key(record: dict[str, object]) -> tuple[object, object, object]:
    return record.get("kind"), record.get("policy"), record.get("step")
