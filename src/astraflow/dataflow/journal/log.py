"""The command log: SQLite in WAL mode. A command is in the log before it is applied, and applied before it is answered.

```
 recovery = newest snapshot + commands after it, through the same machine
```

| file                    | holds                                                                                |
|-------------------------|--------------------------------------------------------------------------------------|
| journal.sqlite          | `log`: number, run time, JSON and checksum of each command; `meta`: the format       |
| journal.head            | the newest command that was answered                                                 |
| snapshot-<command>.a/.b | the machine's state, the run file and the fingerprints of the sources it belongs to  |
| damaged-<n>/            | copies of what was damaged, kept when somebody went on all the same                  |
| history/                | the lives of tasks, for `astraflow trace`                                            |

All commands of one turn of the event loop share one transaction. What SQLite finished survives `kill -9` at any point;
with `fsync` a power failure, too. Compaction (snapshot files, moving the write-ahead log into the database) is done in
a thread: the loop only deletes the rows. One process may hold a journal; the lock dies with the process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from astraflow.dataflow.journal.head import HeadFile
from astraflow.dataflow.journal.recovery import FORMAT, HEAD, LOG, Logged, Recovered, recover, refuse_loss, row_sum
from astraflow.dataflow.journal.snapshots import Snapshot, delete_snapshots, snapshot_files, write_snapshot
from astraflow.errors import JournalError

log = logging.getLogger("astraflow.dataflow")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS log (seq INTEGER PRIMARY KEY, now REAL NOT NULL, command BLOB NOT NULL, sum BLOB NOT NULL);
"""
_INSERT = "INSERT INTO log VALUES (?, ?, ?, ?)"


class Journal:
    """The journal in `directory`, locked for this process. `recovered`: what was found.

    Args: fsync: commands survive a power failure. accept_damage: go on from the last good command.
    Raises: JournalError: it is in use, of another format, or cannot be opened. JournalDamaged: commands would be lost.
    """

    def __init__(self, directory: Path, *, fsync: bool = False, accept_damage: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.path = directory, directory / LOG
        self._lock = _lock(directory / "journal.lock")
        try:
            self.recovered = recover(directory)
            if not accept_damage:
                refuse_loss(directory, self.recovered)
            for note in self.recovered.notes:
                log.warning("journal: %s", note)
            if self.recovered.damage:
                self._set_aside()
            if not self.path.exists():
                self._write_anew(self.directory / f"{LOG}.new")  # a start that is killed leaves no half of a database
            self._db = self._open(fsync)
            self._head = HeadFile(directory / HEAD, synced=fsync)
        except BaseException:
            os.close(self._lock)
            raise
        self.seq = self.recovered.seq
        self._head.write(self.seq)
        self._snapshot = self.recovered.snapshot
        self._base = self._snapshot.seq if self._snapshot is not None else 0
        self.num_bytes = sum(len(x.command) for x in self.recovered.log)  # of commands since the snapshot

    @property
    def num_since_snapshot(self) -> int:
        """Commands that the newest snapshot does not contain."""
        return self.seq - self._base

    @property
    def num_in_snapshot(self) -> int:
        """The newest command that the newest snapshot contains."""
        return self._base

    def meta(self) -> dict[str, str]:
        """What the journal belongs to; empty for a new one."""
        return dict(self._snapshot.meta) if self._snapshot is not None else {}

    def append(self, entries: Sequence[tuple[float, bytes]]) -> None:
        """Log commands in order, all or none.

        Raises: JournalError: the disk is full or failed; nothing was added.
        """
        self._insert([Logged(self.seq + i, now, command) for i, (now, command) in enumerate(entries, 1)])
        self.seq += len(entries)
        self.num_bytes += sum(len(command) for _, command in entries)
        self._head.write(self.seq)

    def load(self) -> tuple[bytes | None, float]:
        """The newest snapshot and its run time; None: a fresh journal."""
        snapshot = self._snapshot
        return (snapshot.state, snapshot.now) if snapshot is not None else (None, 0.0)

    def log(self) -> Iterator[Logged]:
        """The commands that were found after the snapshot, oldest first."""
        yield from self.recovered.log

    def forget_recovered(self) -> None:
        """The state was built: what it was built from need not stay in memory."""
        self.recovered = Recovered(None, [], self.recovered.damage, self.recovered.notes)
        if self._snapshot is not None:
            self._snapshot = self._snapshot._replace(state=b"")

    def begin_snapshot(self, state: bytes, now: float, meta: dict[str, str] | None = None) -> Snapshot:
        """A snapshot of `state`, which contains every command so far; hand it to `compact`, then to `end_snapshot`.
        `meta`: what changed of it."""
        return Snapshot(self.seq, now, {**self.meta(), **(meta or {})}, state)

    def compact(self, snapshot: Snapshot) -> None:
        """Write `snapshot`, and move the write-ahead log into the database. For any thread, beside `append`.

        Raises: JournalError: the disk is full or failed.
        """
        write_snapshot(self.directory, snapshot)
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(self.path, timeout=1.0)) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # nobody waits for this one, and it leaves little for the next
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """`snapshot` is written: forget the commands that it contains, and older snapshots.

        Raises: JournalError: the disk is full or failed; the commands stay and do no harm.
        """
        self.num_bytes = self.num_bytes * (self.seq - snapshot.seq) // max(1, self.num_since_snapshot)
        self._base, self._snapshot = snapshot.seq, snapshot._replace(state=b"")
        self._transaction("DELETE FROM log WHERE seq <= ?", [(snapshot.seq,)])
        delete_snapshots(self.directory, snapshot.seq)

    def snapshot(self, state: bytes, now: float, meta: dict[str, str] | None = None) -> None:
        """Keep `state`, which contains every command so far, and forget those commands."""
        snapshot = self.begin_snapshot(state, now, meta)
        self.compact(snapshot)
        self.end_snapshot(snapshot)

    def close(self) -> None:
        """Release the journal."""
        self._db.close()
        self._head.close()
        os.close(self._lock)

    def _open(self, fsync: bool) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
            db.execute("PRAGMA wal_autocheckpoint=0")  # `compact` does it
            db.executescript(_SCHEMA)
            db.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (FORMAT,))
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no frame of an earlier life stays behind the new ones
        except sqlite3.Error as error:
            raise JournalError(
                "journal", str(self.path), f"cannot be opened ({error})", "restore the file, or use a new run directory"
            ) from error
        return db

    def _set_aside(self) -> None:
        """Keep copies of damaged files; the log is written anew from its good rows when it is one of them."""
        place = self.directory / f"damaged-{1 + sum(1 for _ in self.directory.glob('damaged-*'))}"
        place.mkdir()
        files = {d.file for d in self.recovered.damage}
        snapshots = {path.name for _, path in snapshot_files(self.directory)}
        in_log = bool(files - snapshots)
        for name in sorted(files | {LOG, f"{LOG}-wal"} if in_log else files):
            if (path := self.directory / name).exists():
                shutil.copy2(path, place / name)
        for damage in self.recovered.damage:
            log.error(
                "journal: %s was damaged at %s; %d commands are lost, a copy is in %s", damage.file, damage.position,
                damage.num_lost, place,
            )  # fmt: skip
        for name in files & snapshots:
            (self.directory / name).unlink()
        if in_log:
            self._write_anew(self.directory / f"{LOG}.new")

    def _write_anew(self, draft: Path) -> None:
        for suffix in ("", "-journal", "-wal", "-shm"):
            Path(f"{draft}{suffix}").unlink(missing_ok=True)
        with closing(sqlite3.connect(draft, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(_SCHEMA)
            db.executemany(_INSERT, [(*row, row_sum(*row)) for row in self.recovered.log])
        for suffix in ("-wal", "-shm"):  # before the swap: SQLite would take them for those of the new file
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        draft.replace(self.path)

    def _insert(self, rows: Sequence[Logged]) -> None:
        self._transaction(_INSERT, [(*row, row_sum(*row)) for row in rows])

    def _transaction(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
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
