"""metrics.jsonl: one row per acknowledged step and per evaluation round; the dataflow service is its only writer."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

from astraflow.config.schema import RunConfig
from astraflow.dataflow.machine.commands import MetricsRow
from astraflow.observe.health.watch import Watch
from astraflow.observe.health.window import Limits
from astraflow.observe.jsonl import JsonlWriter, read_jsonl

log = logging.getLogger("astraflow.dataflow")


class MetricsFile:
    """Appends rows `{kind, policy, step, time_s, <metric>: <number>, ...}`, each at most once.

    After a crash the journal is replayed, and rows whose writing was cut off are written then. Rows that cannot be
    written (full disk) wait for the next one: by then their step is trained, so the service must not end for them.
    What they warn of is logged.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        _cut_torn_line(path)
        rows = read_jsonl(path)
        self._keys = {_key(row) for row in rows}
        self._watch = Watch(Limits.of(config))
        for row in rows:
            self._watch.add(row)  # said already
        self._writer = JsonlWriter(path)
        self._waiting: deque[dict[str, object]] = deque()
        self.path, self.num_failures = path, 0

    @property
    def num_waiting(self) -> int:
        """Rows that are not on the disk."""
        return len(self._waiting)

    def append(self, row: MetricsRow, more: dict[str, float] | None = None) -> None:
        """Write one row, with metrics that only the service knows."""
        record = {"kind": row.kind, "policy": row.policy, "step": row.step, "time_s": round(row.time_s, 3)}
        if _key(record) not in self._keys:
            self._keys.add(_key(record))
            whole = {**record, **(more or {}), **row.metrics, **record}  # a metric may have such a name
            self._waiting.append(whole)
            self.flush()
            for warned in self._watch.add(whole):
                log.warning("%s step %d: %s (%s)", warned.policy, warned.step, warned.message, warned.rule)

    def flush(self) -> None:
        """Write what waits, in order; logs when it cannot."""
        while self._waiting:
            try:
                self._writer.append(self._waiting[0])
            except OSError as error:
                self.num_failures += 1
                log.error(
                    "metrics=%s cannot be written (%s), %d rows wait; make room on the disk", self.path,
                    error.strerror, len(self._waiting),
                )  # fmt: skip
                return
            self._waiting.popleft()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _key(record: dict[str, object]) -> tuple[object, object, object]:
    return record.get("kind"), record.get("policy"), record.get("step")
