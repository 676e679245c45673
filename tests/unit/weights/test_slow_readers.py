"""A reader that takes little keeps its connection and its lease; one that takes nothing loses both."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from astraflow.testing.runs import wait_until
from astraflow.testing.services import serving_weights
from astraflow.weights import app
from astraflow.weights.files import leases
from astraflow.weights.files.leases import leased_versions
from astraflow.weights.store import FileStore

NBYTES = 24 << 20  # more than sockets hold


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    made = FileStore(tmp_path, "actor", durable=False)
    made.publish(0, {"w": torch.zeros(NBYTES, dtype=torch.uint8)})
    return made


@contextmanager
def asked(store: FileStore) -> Iterator[socket.socket]:
    """A connection on which the part was asked for and nothing was read; it has room for little."""
    with serving_weights(store.directory.parent) as url, closing(socket.socket()) as sock:
        address = urlsplit(url)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(20)
        sock.connect((address.hostname, address.port))
        sock.sendall(b"GET /weights/actor/0/model.safetensors HTTP/1.1\r\nhost: x\r\n\r\n")
        yield sock


def read_slowly(sock: socket.socket, turns: int, pause_s: float) -> int:
    """Bytes that came in so many turns."""
    pause, count = threading.Event(), 0
    for _ in range(turns):
        piece = sock.recv(4096)
        count += len(piece)
        if not piece:
            break
        pause.wait(pause_s)
    return count


def test_a_slow_reader_is_not_cut_and_its_version_stays(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STALL_S", 1.0)
    monkeypatch.setattr(app, "LOOK_S", 0.05)
    monkeypatch.setattr(leases.ReaderLease.__init__, "__defaults__", (1.0,))
    with asked(store) as sock:
        came = 0
        for _ in range(10):  # three times the limit; the first piece is 4 MB, it takes none of them as a whole
            came += read_slowly(sock, 6, 0.05)
            assert leased_versions(store.directory) == {0}
        while came < NBYTES and (piece := sock.recv(1 << 20)):
            came += len(piece)
        assert came >= NBYTES
    wait_until(lambda: leased_versions(store.directory) == set(), "the lease to end", 20)


def test_a_reader_that_takes_nothing_is_cut_and_holds_nothing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "STALL_S", 0.3)
    monkeypatch.setattr(app, "LOOK_S", 0.05)
    with asked(store) as sock:
        wait_until(lambda: bool(leased_versions(store.directory)), "the lease", 20)
        wait_until(lambda: leased_versions(store.directory) == set(), "the end of the lease", 20)
        assert "took nothing for 0.3 s" in caplog.text
        with pytest.raises(ConnectionError):
            while sock.recv(1 << 20):
                pass


def test_what_a_reader_has_not_taken_of_a_finished_answer_keeps_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "LOOK_S", 0.02)
    store = FileStore(tmp_path, "actor", durable=False)
    store.publish(0, {"w": torch.zeros(1 << 20, dtype=torch.uint8)})  # the kernel takes it all
    with asked(store) as sock:
        wait_until(lambda: bool(leased_versions(store.directory)), "the lease", 20)
        threading.Event().wait(0.3)
        assert leased_versions(store.directory) == {0}, "it is still reading"
        came = 0
        while came < 1 << 20:
            came += len(sock.recv(1 << 20))
        wait_until(lambda: leased_versions(store.directory) == set(), "the end of the lease", 20)
