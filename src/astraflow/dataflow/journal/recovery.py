"""What a journal holds, judged before anything is changed: the newest snapshot, the good commands after it, damage.

| found                                              | what it is                                             |
|----------------------------------------------------|--------------------------------------------------------|
| the log ends before the command that was answered  | damage: commands would be lost                         |
| bad frames, and nothing that was answered misses   | a torn tail: one line in the log                       |
| one copy of a snapshot is bad                      | damage that costs nothing: the other copy is used      |
| both are bad                                       | nothing to apply commands to: the file must come back  |
"""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import xxhash

from astraflow.dataflow.journal.head import read_head
from astraflow.dataflow.journal.snapshots import Snapshot, read_snapshot, snapshot_files
from astraflow.dataflow.journal.wal import WalReport, walk
from astraflow.errors import JournalError

FORMAT = "2"
LOG, HEAD = "journal.sqlite", "journal.head"
_SEED = struct.Struct("<qd")


class Logged(NamedTuple):
    """One command of the log."""

    seq: int
    now: float  # run time, seconds
    command: bytes


class Damage(NamedTuple):
    """Bytes that changed, or are gone."""

    file: str
    position: str
    num_lost: int  # commands that were answered and cannot be read
    exact: bool = True  # False: at least so many


class Recovered(NamedTuple):
    """What a start goes on from. `log`: the good commands after the snapshot, oldest first."""

    snapshot: Snapshot | None
    log: list[Logged]
    damage: list[Damage]
    notes: list[str]  # sentences for the log

    @property
    def seq(self) -> int:
        """The last good command."""
        return self.log[-1].seq if self.log else self.snapshot.seq if self.snapshot else 0

    @property
    def num_lost(self) -> int:
        """Commands that were answered and are gone."""
        return max((d.num_lost for d in self.damage), default=0)


class JournalDamaged(JournalError):
    """Going on would lose commands; nothing was changed. `num_lost`: how many."""

    exit_code = 2  # starting again does not help

    def __init__(self, value: str, rule: str, fix: str, num_lost: int) -> None:
        self.num_lost = num_lost
        super().__init__("journal", value, rule, fix)


def row_sum(seq: int, now: float, command: bytes) -> bytes:
    """The checksum of a row of the log: of its number, its time and its command."""
    return xxhash.xxh3_64_digest(command, xxhash.xxh3_64_intdigest(_SEED.pack(seq, now)))


def recover(directory: Path) -> Recovered:
    """Read the journal in `directory` without changing it. None of it: an empty result.

    Raises: JournalError: of another format. JournalDamaged: there is nothing to go on from.
    """
    report = walk(directory / f"{LOG}-wal")
    _refuse_format(directory / LOG)
    snapshot, damage = newest_snapshot(directory)
    after = snapshot.seq if snapshot is not None else 0
    log, bad = read_log(directory / LOG, after)
    last = log[-1].seq if log else after
    head = read_head(directory / HEAD)
    notes: list[str] = []
    if head is not None and head.trusted:
        if head.seq > last:
            damage.append(_place(directory, report, bad, last, head.seq - last, exact=True))
    elif report.damaged_at is not None or bad is not None:
        damage.append(_place(directory, report, bad, last, 1, exact=False))
    elif head is not None and head.seq > last:
        notes.append(f"commands {last + 1} to {head.seq} are gone with the power failure (dataflow.fsync is false)")
    if not damage and (report.torn or report.damaged_at is not None):
        notes.append(f"{LOG}-wal ends in a transaction that was never answered; it is left out")
    return Recovered(snapshot, log, damage, notes)


def refuse_loss(directory: Path, found: Recovered) -> None:
    """Refuse a start that would lose commands.

    Raises: JournalDamaged: naming file, position, number of commands and the fix.
    """
    if not found.num_lost:
        return
    worst = max(found.damage, key=lambda d: d.num_lost)
    count = f"{worst.num_lost}" if worst.exact else f"at least {worst.num_lost}"
    raise JournalDamaged(
        str(directory / worst.file),
        f"is damaged at {worst.position}: {count} command{'s' if worst.num_lost > 1 else ''} after command "
        f"{found.seq} would be lost",
        "restore the file, or start once with --accept-damage to go on from that command (a copy is kept)",
        worst.num_lost,
    )


def _place(directory: Path, report: WalReport, bad: str | None, last: int, lost: int, *, exact: bool) -> Damage:
    if report.damaged_at is not None:
        return Damage(f"{LOG}-wal", f"byte {report.damaged_at}", lost, exact)
    if bad is None and report.num_frames > report.num_committed:
        return Damage(f"{LOG}-wal", f"frame {report.num_committed + 1} of {report.num_frames}", lost, exact)
    return Damage(LOG, bad or f"row {last + 1}, which is missing", lost, exact)


def newest_snapshot(directory: Path) -> tuple[Snapshot | None, list[Damage]]:
    """The newest snapshot (None: there is none) and which of its copies are damaged.

    Raises: JournalDamaged: both are.
    """
    files = snapshot_files(directory)
    newest = [path for seq, path in files if seq == files[0][0]]
    read = {path: read_snapshot(path) for path in newest}
    damage = [Damage(path.name, "some byte (its checksum differs)", 0) for path, s in read.items() if s is None]
    good = next((s for s in read.values() if s is not None), None)
    if newest and good is None:
        raise JournalDamaged(
            ", ".join(str(path) for path in newest), "are damaged, and the log holds only what came after them",
            "restore one of them, or start the run again in a new directory", 0,
        )  # fmt: skip
    return good, damage


def read_log(path: Path, after: int) -> tuple[list[Logged], str | None]:
    """Commands after number `after` up to the first bad one, and where that is."""
    log: list[Logged] = []
    if not path.exists():
        return log, None
    last = after
    try:
        with closing(open_read_only(path)) as db:
            rows = db.execute("SELECT seq, now, command, sum FROM log WHERE seq > ? ORDER BY seq", (after,))
            for seq, now, command, stored in rows:
                if seq != last + 1:
                    return log, f"row {last + 1}, which is missing"
                if not isinstance(now, float) or not isinstance(command, bytes) or row_sum(seq, now, command) != stored:
                    return log, f"row {seq}"
                log.append(Logged(seq, now, command))
                last = seq
    except (sqlite3.Error, OverflowError) as error:
        return log, f"row {last + 1} ({error})"
    return log, None


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, also while the service runs."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)


def _refuse_format(path: Path) -> None:
    """Another format is known by its own table; a log that cannot say its format is judged by its rows."""
    if not path.exists():
        return
    try:
        with closing(open_read_only(path)) as db:
            found = db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
            tables = db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'snapshot'").fetchone()[0]
    except sqlite3.Error:
        return
    form = found[0] if found else "1" if tables else FORMAT
    if form != FORMAT:
        raise JournalError(
            "journal.format", form, f"must be {FORMAT}", "use the AstraFlow version that wrote this run directory"
        )
