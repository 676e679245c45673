"""The command log: SQLite in WAL mode. A command is in the log before it is applied, and applied before it is answered.

```
 recovery = newest snapshot + commands after it, through the same machine
```

| table    | holds                                                                                     |
|----------|-------------------------------------------------------------------------------------------|
| meta     | format, run_id, the run file and the fingerprints of the sources that the log belongs to  |
| snapshot | one row: the machine's state, the last command it contains, and its run time              |
| log      | commands after the snapshot: number, run time, JSON                                       |

All commands of one turn of the event loop share one transaction. A transaction that SQLite finished survives `kill -9`
at any point (WAL, synchronous=NORMAL); after a power failure the newest ones may be missing, never torn. One process
may hold a journal; the lock dies with the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from astraflow.errors import JournalError

FORMAT = "1"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER, now REAL, state BLOB);
CREATE TABLE IF NOT EXISTS log (seq INTEGER PRIMARY KEY, now REAL NOT NULL, command BLOB NOT NULL);
"""


class Logged(NamedTuple):
    """One command of the log."""

    now: float  # run time, seconds
    command: bytes


class Journal:
    """The journal in `directory`, locked for this process.

    Raises: JournalError: it is in use, broken, or of another format.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "journal.sqlite"
        self._lock = _lock(directory / "journal.lock")
        try:
            self._db = self._open()
        except BaseException:
            os.close(self._lock)
            raise
        row = self._db.execute("SELECT MAX(seq) FROM log").fetchone()
        held = self._db.execute("SELECT seq FROM snapshot").fetchone()
        self._seq = max(row[0] or 0, held[0] if held else 0)
        self.num_since_snapshot = self._db.execute("SELECT COUNT(*) FROM log").fetchone()[0]

    def meta(self) -> dict[str, str]:
        """What the journal belongs to; empty for a new one."""
        return dict(self._db.execute("SELECT key, value FROM meta").fetchall())

    def set_meta(self, values: dict[str, str]) -> None:
        """Write what the journal belongs to."""
        self._transaction([("INSERT OR REPLACE INTO meta VALUES (?, ?)", list({"format": FORMAT, **values}.items()))])

    def append(self, entries: Sequence[tuple[float, bytes]]) -> None:
        """Log commands in order, all or none.

        Raises: JournalError: the disk is full or failed; nothing was added.
        """
        rows = [(self._seq + i, now, command) for i, (now, command) in enumerate(entries, 1)]
        self._transaction([("INSERT INTO log VALUES (?, ?, ?)", rows)])
        self._seq += len(rows)
        self.num_since_snapshot += len(rows)

    def snapshot(self, state: bytes, now: float, meta: dict[str, str] | None = None) -> None:
        """Keep `state`, which contains every command so far, and forget those commands."""
        steps: list[tuple[str, list[tuple[object, ...]]]] = [
            ("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)", [(self._seq, now, state)]),
            ("DELETE FROM log WHERE seq <= ?", [(self._seq,)]),
            ("INSERT OR REPLACE INTO meta VALUES (?, ?)", list((meta or {}).items())),
        ]
        self._transaction(steps)
        self.num_since_snapshot = 0

    def load(self) -> tuple[bytes | None, float]:
        """The newest snapshot and its run time; None: a fresh journal."""
        row = self._db.execute("SELECT state, now FROM snapshot").fetchone()
        return (row[0], row[1]) if row else (None, 0.0)

    def log(self) -> Iterator[Logged]:
        """Commands after the snapshot, oldest first."""
        for now, command in self._db.execute("SELECT now, command FROM log ORDER BY seq"):
            yield Logged(now, command)

    def close(self) -> None:
        """Release the journal."""
        self._db.close()
        os.close(self._lock)

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(_SCHEMA)
            found = dict(db.execute("SELECT key, value FROM meta").fetchall()).get("format", FORMAT)
        except sqlite3.Error as error:
            raise JournalError(
                "journal", str(self.path), f"cannot be opened ({error})", "restore the file, or use a new run directory"
            ) from error
        if found != FORMAT:
            db.close()
            raise JournalError(
                "journal.format", found, f"must be {FORMAT}", "use the AstraFlow version that wrote this run directory"
            )
        return db

    def _transaction(self, steps: Sequence[tuple[str, Sequence[tuple[object, ...]]]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for statement, rows in steps:
                self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise JournalError(
                "journal", str(self.path), f"cannot be written ({error})",
                "make room on the disk; the request is repeated by its sender",
            ) from error  # fmt: skip


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise JournalError(
            "journal", str(path.parent), "is in use by another process", "stop it, or use another run directory"
        ) from error
    return descriptor
