"""Clients that connect, or begin a request, and then say nothing."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from astraflow.wire import bulk
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.local import Inbox
from http_service import running

HEAD = b"POST /bulk HTTP/1.1\r\nhost: x\r\nx-astraflow-protocol: 1\r\ncontent-type: " + CONTENT_TYPE.encode() + b"\r\n"
BEGUN = {
    "nothing": b"",
    "half a head": b"POST /ec",
    "a head": HEAD + b"content-length: 100\r\n\r\n",
    "half a body": HEAD + b"content-length: 100\r\n\r\n" + bytes(50),
    "half a large body": HEAD + b"content-length: 1000000\r\n\r\n" + bytes(500_000),
}


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 5.0)


def is_closed_after(sock: socket.socket, limit_s: float) -> float | None:
    """Seconds until the service closed it."""
    begin = time.monotonic()
    sock.settimeout(limit_s)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return None
    return time.monotonic() - begin


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_who_owes_the_rest_of_a_request_is_cut(
    begun: bytes, fast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bulk, "SILENT_S", 0.2)
    with running(inbox=Inbox(tmp_path), fast=fast) as url, closing(connected(url)) as sock:
        sock.sendall(begun)
        assert is_closed_after(sock, 5.0) is not None


def test_who_is_slow_but_goes_on_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "SILENT_S", 0.4)
    with running() as url, closing(connected(url)) as sock:
        for letter in b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n":
            sock.sendall(bytes([letter]))
            time.sleep(0.03)
        sock.settimeout(5.0)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_who_waits_for_an_answer_and_who_is_idle_between_requests_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "SILENT_S", 0.1)
    with running() as url, closing(connected(url)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65536)
        assert is_closed_after(sock, 0.6) is None
        sock.sendall(b"GET /hea")
        assert is_closed_after(sock, 5.0) is not None


@pytest.mark.parametrize("fast", [True, False])
def test_no_connection_outlives_the_service(fast: bool) -> None:
    """One whose client does not read its answer is cut when the grace is over."""
    size = 32 << 20  # more than the kernel keeps for it
    with running(fast=fast) as url:
        sock = connected(url)
        sock.sendall(HEAD + f"content-length: {size}\r\n\r\n".encode() + bytes(size))
        assert sock.recv(1)
    with closing(sock), pytest.raises(ConnectionResetError):
        while sock.recv(1 << 20):
            pass
