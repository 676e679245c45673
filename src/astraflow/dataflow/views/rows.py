"""metrics.jsonl: one row per acknowledged step and per evaluation round; the dataflow service is its only writer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from astraflow.dataflow.machine.commands import MetricsRow


class MetricsFile:
    """Appends rows `{kind, policy, step, time_s, <metric>: <number>, ...}`, each at most once.

    After a crash the journal is replayed, and rows whose writing was cut off are written then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = _whole_lines(path)
        self._keys = {_key(msgspec.json.decode(line)) for line in whole.splitlines() if line}
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def append(self, row: MetricsRow, more: dict[str, float] | None = None) -> None:
        """Write one row, with metrics that only the service knows."""
        record = {"kind": row.kind, "policy": row.policy, "step": row.step, "time_s": round(row.time_s, 3)}
        if _key(record) in self._keys:
            return
        self._keys.add(_key(record))
        self._file.write(msgspec.json.encode({**record, **(more or {}), **row.metrics}) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _key(record: dict[str, object]) -> tuple[object, object, object]:
    return record.get("kind"), record.get("policy"), record.get("step")
