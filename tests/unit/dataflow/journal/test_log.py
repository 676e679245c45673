"""The command log: all or nothing, one owner, full disks, other formats, damage told from a torn tail."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.journal.log import Journal
from astraflow.dataflow.journal.recovery import JournalDamaged, recover
from astraflow.dataflow.journal.wal import walk
from astraflow.errors import JournalError


def commands(journal: Journal) -> list[tuple[float, bytes]]:
    """What a start of the service would apply."""
    return [(x.now, x.command) for x in journal.log()]


def test_what_was_appended_is_there_after_opening_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(1.0, b"a"), (2.0, b"b")])
    journal.close()
    journal = Journal(tmp_path)
    assert commands(journal) == [(1.0, b"a"), (2.0, b"b")]
    assert journal.load() == (None, 0.0) and journal.num_since_snapshot == 2
    journal.close()


def test_a_start_that_is_killed_while_it_makes_the_journal_leaves_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, killed = tmp_path / "journal", list[Path]()

    def look() -> None:
        killed.append(tmp_path / f"killed-{len(killed)}")
        shutil.copytree(made, killed[-1])

    class Slow(sqlite3.Connection):
        def execute(self, *words: Any) -> sqlite3.Cursor:
            look()
            cursor = super().execute(*words)
            look()
            return cursor

        def executescript(self, script: str) -> sqlite3.Cursor:
            look()
            for statement in script.strip().splitlines():
                self.execute(statement)
            return self.cursor()

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Slow))
        Journal(made).close()
    assert len(killed) > 10
    for place in killed:
        journal = Journal(place)
        assert journal.seq == 0 and commands(journal) == []
        journal.append([(1.0, b"a")])
        journal.close()
        again = Journal(place)
        assert commands(again) == [(1.0, b"a")]
        again.close()


def test_a_snapshot_replaces_the_commands_that_it_contains(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(1.0, b"a")])
    journal.snapshot(b"state", 1.5, {"config": "{}"})
    journal.append([(2.0, b"b")])
    journal.close()
    journal = Journal(tmp_path)
    assert journal.load() == (b"state", 1.5)
    assert commands(journal) == [(2.0, b"b")]
    assert journal.meta()["config"] == "{}"
    journal.append([(3.0, b"c")])
    journal.snapshot(b"more", 4.0, {"run_id": "r"})
    assert journal.meta() == {"config": "{}", "run_id": "r"}
    journal.close()
    assert sorted(p.name for p in tmp_path.glob("snapshot*")) == ["snapshot-000000000003.a", "snapshot-000000000003.b"]


def test_commands_that_come_while_a_snapshot_is_written_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(1.0, b"a")])
    snapshot = journal.begin_snapshot(b"state", 1.0)
    journal.append([(2.0, b"b")])
    journal.compact(snapshot)
    journal.append([(3.0, b"c")])
    shutil.copytree(tmp_path, tmp_path / "killed")
    journal.end_snapshot(snapshot)
    assert journal.num_since_snapshot == 2
    journal.close()
    for directory in (tmp_path, tmp_path / "killed"):
        journal = Journal(directory)
        assert journal.load() == (b"state", 1.0)
        assert commands(journal) == [(2.0, b"b"), (3.0, b"c")]
        journal.close()


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from astraflow.dataflow.journal.log import Journal; "
        "j = Journal(pathlib.Path(sys.argv[1])); j.append([(1.0, b'a')]); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)}, check=False
    )
    assert done.returncode == -9
    journal = Journal(tmp_path)
    assert commands(journal) == [(1.0, b"a")]
    journal.close()


def rows(journal: Journal) -> list[float]:
    """Run times of the commands in the log now."""
    return [now for (now,) in journal._db.execute("SELECT now FROM log ORDER BY seq")]


def test_a_full_disk_is_a_journal_error_and_nothing_is_half_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(1.0, b"a")])
    journal._db.execute("PRAGMA max_page_count=8")
    with pytest.raises(JournalError, match="make room"):
        journal.append([(2.0, b"small"), (3.0, b"x" * 100_000)])
    assert rows(journal) == [1.0] and journal.seq == 1
    journal._db.execute("PRAGMA max_page_count=1000")
    journal.append([(4.0, b"x" * 100_000)])
    assert rows(journal) == [1.0, 4.0]
    journal.close()


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.snapshot(b"old", 1.0)
    journal.append([(2.0, b"a")])

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("astraflow.dataflow.journal.snapshots.os.fsync", full)
        with pytest.raises(JournalError, match=r"snapshot=.*No space left"):
            journal.snapshot(b"new", 3.0)
    assert len(list(tmp_path.glob("snapshot-*"))) == 2
    journal.close()
    journal = Journal(tmp_path)
    assert journal.load()[0] == b"old" and commands(journal) == [(2.0, b"a")]
    journal.close()


@pytest.mark.parametrize("fsync", [False, True])
def test_fsync_is_what_sqlite_is_told(tmp_path: Path, fsync: bool) -> None:
    journal = Journal(tmp_path, fsync=fsync)
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == (2 if fsync else 1)
    journal.close()


def test_another_format_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("INSERT INTO meta VALUES ('format', '1')")
        db.commit()
    with pytest.raises(JournalError, match=r"journal\.format=1 must be 2"):
        Journal(tmp_path)


NUM = 40


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a kill leaves it: a snapshot, some commands in the database, the rest in the write-ahead log."""
    directory = tmp_path_factory.mktemp("journal")
    code = (
        "import os, pathlib, random, sys; from astraflow.dataflow.journal.log import Journal; rng = random.Random(1); "
        "j = Journal(pathlib.Path(sys.argv[1])); j.append([(0.0, b'first')]); j.snapshot(b'state', 0.5, {'a': 'b'}); "
        "add = lambda n: [j.append([(1.0, rng.randbytes(rng.choice([40, 400, 5000])))]) for _ in range(n)]; "
        f"add({NUM // 2}); j._db.execute('PRAGMA wal_checkpoint(TRUNCATE)'); add({NUM // 2}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert len(recover(directory).log) == NUM
    return directory


def changed(killed: Path, tmp_path: Path, name: str, position: float, bit: int) -> Path:
    """A copy of the journal with one bit of a file flipped."""
    directory = shutil.copytree(killed, tmp_path / "copy", dirs_exist_ok=True)
    path = directory / name
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)
    return directory


@pytest.mark.parametrize("number", range(60))
def test_a_flipped_bit_is_found_or_harmless_and_never_changes_what_is_replayed(
    killed: Path, tmp_path: Path, number: int
) -> None:
    rng = random.Random(number)
    name = rng.choice(["journal.sqlite", "journal.sqlite-wal", "journal.sqlite-wal", "journal.head"])
    directory = changed(killed, tmp_path, name, rng.random(), rng.randrange(8))
    whole = recover(killed).log
    found = recover(directory)
    assert found.log == whole[: len(found.log)]
    assert found.num_lost == NUM - len(found.log)
    if name.endswith("wal"):
        assert found.num_lost and found.damage[0].file == name
    if not found.num_lost:
        Journal(directory).close()
        return
    before = {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix != ".lock"}
    with pytest.raises(JournalDamaged, match="--accept-damage") as refused:
        Journal(directory)
    assert refused.value.num_lost == found.num_lost
    after = {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix != ".lock"}
    assert {n: c for n, c in after.items() if "shm" not in n} == {n: c for n, c in before.items() if "shm" not in n}
    journal = Journal(directory, accept_damage=True)
    assert journal.recovered.log == found.log
    journal.append([(9.0, b"new")])
    journal.close()
    assert (directory / "damaged-1" / name).read_bytes() == before[name]
    again = Journal(directory)
    assert not again.recovered.damage and commands(again)[-1] == (9.0, b"new")
    again.close()


@pytest.mark.parametrize("position", [0.0, 0.1, 0.5, 1.0])
def test_one_bad_copy_of_a_snapshot_costs_nothing(killed: Path, tmp_path: Path, position: float) -> None:
    directory = changed(killed, tmp_path, "snapshot-000000000001.a", position, 3)
    journal = Journal(directory)
    assert journal.recovered.damage[0].file == "snapshot-000000000001.a" and journal.recovered.num_lost == 0
    assert journal.load() == (b"state", 0.5) and len(commands(journal)) == NUM
    journal.close()
    shutil.copy(directory / "damaged-1" / "snapshot-000000000001.a", directory / "snapshot-000000000001.b")
    with pytest.raises(JournalDamaged, match="restore one of them"):
        Journal(directory, accept_damage=True)


@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal"])
def test_a_lost_file_is_found(killed: Path, tmp_path: Path, name: str) -> None:
    directory = shutil.copytree(killed, tmp_path / "copy")
    (directory / name).unlink()
    with pytest.raises(JournalDamaged, match="would be lost"):
        Journal(directory)


@pytest.mark.parametrize("cut", [1, 30, 4096, 5000])
def test_a_torn_tail_that_nobody_was_answered_for_is_left_out(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The head is written after the transaction: a kill in between leaves frames that it does not count."""
    journal = Journal(tmp_path)
    for number in range(5):
        journal.append([(float(number), b"x" * 3000)])
    head = (tmp_path / "journal.head").read_bytes()
    journal.append([(5.0, b"y" * 9000)])
    killed = shutil.copytree(tmp_path, tmp_path / "killed")
    journal.close()
    (killed / "journal.head").write_bytes(head)
    wal = killed / "journal.sqlite-wal"
    wal.write_bytes(wal.read_bytes()[:-cut])
    assert walk(wal).torn
    journal = Journal(killed)
    assert [now for now, _ in commands(journal)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert "never answered" in caplog.text and not journal.recovered.damage
    journal.close()


def test_a_power_failure_may_cost_the_newest_commands_unless_they_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fsync in (False, True):
        journal = Journal(tmp_path / f"{fsync}", fsync=fsync)
        journal.append([(1.0, b"a")])
        early = shutil.copytree(tmp_path / f"{fsync}", tmp_path / f"{fsync}-failed")
        journal.append([(2.0, b"b")])
        shutil.copy(tmp_path / f"{fsync}" / "journal.head", early / "journal.head")  # got to the disk before the log
        journal.close()
    monkeypatch.setattr("astraflow.dataflow.journal.head._boot", lambda: b"another boot".ljust(32, b"\0"))
    journal = Journal(tmp_path / "False-failed")
    assert "power failure" in journal.recovered.notes[0]
    journal.close()
    with pytest.raises(JournalDamaged):
        Journal(tmp_path / "True-failed", fsync=True)
