"""The command log: all or nothing, one owner, full disks, other formats."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.dataflow.journal import Journal
from astraflow.errors import JournalError


def test_what_was_appended_is_there_after_opening_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.set_meta({"run_id": "r"})
    journal.append([(1.0, b"a"), (2.0, b"b")])
    journal.close()
    journal = Journal(tmp_path)
    assert journal.meta()["run_id"] == "r"
    assert list(journal.log()) == [(1.0, b"a"), (2.0, b"b")]
    assert journal.load() == (None, 0.0) and journal.num_since_snapshot == 2
    journal.close()


def test_a_snapshot_replaces_the_commands_that_it_contains(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(1.0, b"a")])
    journal.snapshot(b"state", 1.5, {"config": "{}"})
    journal.append([(2.0, b"b")])
    journal.close()
    journal = Journal(tmp_path)
    assert journal.load() == (b"state", 1.5)
    assert list(journal.log()) == [(2.0, b"b")]
    assert journal.meta()["config"] == "{}"
    journal.append([(3.0, b"c")])
    assert [command for _, command in journal.log()] == [b"b", b"c"]
    journal.close()


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from astraflow.dataflow.journal import Journal; "
        "j = Journal(pathlib.Path(sys.argv[1])); j.append([(1.0, b'a')]); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={"PYTHONPATH": ":".join(sys.path)}, check=False
    )
    assert done.returncode == -9
    journal = Journal(tmp_path)
    assert list(journal.log()) == [(1.0, b"a")]
    journal.close()


def test_a_full_disk_is_a_journal_error_and_nothing_is_half_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(1.0, b"a")])
    journal._db.execute("PRAGMA max_page_count=8")
    with pytest.raises(JournalError, match="make room"):
        journal.append([(2.0, b"small"), (3.0, b"x" * 100_000)])
    assert list(journal.log()) == [(1.0, b"a")]
    journal._db.execute("PRAGMA max_page_count=1000")
    journal.append([(4.0, b"x" * 100_000)])
    assert [now for now, _ in journal.log()] == [1.0, 4.0]
    journal.close()


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"not a database, certainly not one" * 100)
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path)
    (tmp_path / "journal.sqlite").unlink()
    Journal(tmp_path).close()  # the lock was released


def test_another_format_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.set_meta({})
    journal.close()
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    db.commit()
    db.close()
    with pytest.raises(JournalError, match=r"journal\.format=99"):
        Journal(tmp_path)
