"""Versions that are retired, and those that stay because somebody reads them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from astraflow.testing.weights import make_tensors, same_bits
from astraflow.weights.files import leases
from astraflow.weights.files.leases import ReaderLease, _taking, leased_versions, reading
from astraflow.weights.store import FileStore


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=2)
    for version in range(5):
        store.publish(version, make_tensors(version))
    assert store.versions() == [3, 4]


def test_a_version_that_is_read_stays_until_its_reader_is_done(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=1)
    store.publish(0, make_tensors(0))
    with reading(store.directory, 0):
        store.publish(1, make_tensors(1))
        store.publish(2, make_tensors(2))
        assert store.versions() == [0, 2]
        assert same_bits(store.fetch(0), make_tensors(0))
    store.publish(3, make_tensors(3))
    assert store.versions() == [3]


def test_the_lease_of_a_dead_reader_runs_out(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=1)
    store.publish(0, make_tensors(0))
    ReaderLease(store.directory, 0, seconds=-1.0).extend()
    store.publish(1, make_tensors(1))
    assert store.versions() == [1]
    assert leased_versions(store.directory) == set()
    assert [item.name for item in (store.directory / ".readers").iterdir() if item.name[0] != "."] == []


def test_leases_that_ran_out_go_where_all_versions_stay(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=0)
    store.publish(0, make_tensors(0))
    ReaderLease(store.directory, 0, seconds=-1.0).extend()
    store.publish(1, make_tensors(1))
    assert list((store.directory / ".readers").glob("[0-9]*")) == []


def test_foreign_files_among_leases_are_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=1)
    store.publish(0, make_tensors(0))
    for name in ("x.y", "３.z", " 7.q", "-1.q"):
        (store.directory / ".readers" / name).touch()
    store.publish(1, make_tensors(1))
    assert store.versions() == [1]
    assert len(list((store.directory / ".readers").glob("*.[yzq]"))) == 4


def test_a_stream_of_readers_does_not_keep_what_nobody_reads(tmp_path: Path) -> None:
    """Some reader is taking a lease at any moment: each takes the lock before the one before it leaves it."""
    store = FileStore(tmp_path, "actor", keep=1)
    store.publish(0, make_tensors(0))
    stop, holders = threading.Event(), [threading.Event() for _ in range(2)]

    def take(own: threading.Event, other: threading.Event) -> None:
        while not stop.is_set():
            with _taking(store.directory / ".readers"):
                other.clear()
                own.set()
                other.wait(0.05)  # what retires shuts the gate: then nobody comes

    threads = [threading.Thread(target=take, args=pair) for pair in (holders, holders[::-1])]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, 6):
            store.publish(version, make_tensors(version))
            assert store.versions() == [version]
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def test_nothing_is_retired_while_a_lease_is_being_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RETIRE_WAIT_S", 0.05)
    store = FileStore(tmp_path, "actor", keep=1)
    store.publish(0, make_tensors(0))
    with _taking(store.directory / ".readers"):
        store.publish(1, make_tensors(1))
        assert store.versions() == [0, 1]
    store.publish(2, make_tensors(2))
    assert store.versions() == [2]


def test_tensors_outlive_their_version(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=1)
    store.publish(0, make_tensors(0))
    held = store.fetch(0)
    store.publish(1, make_tensors(1))
    assert store.versions() == [1]
    assert same_bits(held, make_tensors(0))
