"""Client and app against each other over a real socket."""

from __future__ import annotations

import errno
import os
import socket
import threading
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from astraflow.errors import (
    Unauthorized,
    WireError,
)
from astraflow.wire import client as client_module
from astraflow.wire.app import (
    bind,
)
from astraflow.wire.bulk import OneWrite
from astraflow.wire.client import HttpClient
from astraflow.wire.codec import CONTENT_TYPE, read_stream, stream_pieces
from astraflow.wire.local import HOST_HEADER, Inbox, host_identity
from astraflow.wire.messages import Ok
from http_service import NAMES, PATHS, bulk_of, running

POST_BULK = b"POST /bulk HTTP/1.1\r\nhost: x\r\nx-astraflow-protocol: 1\r\n"


def test_struct_goes_there_and_back() -> None:
    with running() as url:
        assert HttpClient(url).json("POST", "/echo", Ok(ok=False), Ok) == Ok(ok=False)


@pytest.mark.parametrize("shared", [True, False])
def test_bulk_of_several_pieces_comes_back_in_one_buffer(
    shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_module, "host_identity", host_identity if shared else lambda: "")
    table = pa.table({"x": pa.array(range(2_000_000), pa.int64())})
    pieces = stream_pieces(Ok(), table)
    NAMES.clear()
    with running(inbox=Inbox(tmp_path)) as url:
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)  # learns where bodies may be put
        for _ in range(2):  # the connection is used again
            _, payload, _ = bulk_of(client, pieces)
            assert read_stream(payload, Ok)[1].equals(table)
    assert [name is not None for name in NAMES] == [shared, shared]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_large_body_over_the_socket_goes_past_the_parser(fast: bool, kept: bool, tmp_path: Path) -> None:
    sizes = [1 << 20, (9 << 20) + 7, 100, 5 << 20, 100_000, 65_536, 65_535]
    PATHS.clear()
    with running(inbox=Inbox(tmp_path) if kept else None, fast=fast) as url:
        client = HttpClient(url)
        client._headers.pop(HOST_HEADER, None)
        for size in sizes:
            content = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
            _, payload, _ = bulk_of(client, [memoryview(content[: size // 3]), memoryview(content[size // 3 : size])])
            assert payload == content[:size]
        assert len(client._pool._idle) == 1  # one connection for all of them
    assert [path is not None for path in PATHS] == [kept and size >= 1 << 20 for size in sizes]
    assert not list(tmp_path.iterdir())


def test_a_refused_large_body_is_not_read_and_the_connection_goes_on(tmp_path: Path) -> None:
    pieces = [memoryview(bytes(8 << 20))]
    with running("right", Inbox(tmp_path)) as url:
        stranger = HttpClient(url, "wrong")
        with pytest.raises(Unauthorized):
            stranger.post_stream("/bulk", pieces, Ok)
        stranger._headers["authorization"] = "Bearer right"
        assert stranger.json("POST", "/echo", Ok(), Ok).ok
        with pytest.raises(WireError, match=r"must be .*arrow"):
            stranger._send("POST", "/bulk", pieces, {"content-type": "text/plain"})
        assert len(bulk_of(stranger, pieces)[1]) == 8 << 20


@pytest.mark.parametrize("at", [0, 100_000, 6 << 20])
def test_a_large_body_that_is_cut_leaves_nothing_behind(at: int, tmp_path: Path) -> None:
    with running(inbox=Inbox(tmp_path)) as url:
        with socket.create_connection(url.removeprefix("http://").split(":"), timeout=60) as sock:
            head = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {8 << 20}\r\n\r\n"
            sock.sendall(POST_BULK + head.encode() + bytes(at))
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)
        assert len(bulk_of(client, [memoryview(bytes(2 << 20))])[1]) == 2 << 20
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_a_large_body_comes_is_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(inbox=Inbox(tmp_path)) as url:
        client = HttpClient(url, give_up_s=0.2)
        client._headers.pop(HOST_HEADER, None)
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(WireError, match=r"cannot be written .No space left") as caught:
            client.post_stream("/bulk", [memoryview(bytes(8 << 20))], Ok)
        monkeypatch.undo()
        assert caught.value.status == 507 and len(bulk_of(client, [memoryview(bytes(2 << 20))])[1]) == 2 << 20
    assert not list(tmp_path.iterdir())


def test_a_body_over_the_limit_is_413_before_it_is_read(tmp_path: Path) -> None:
    pieces = [memoryview(bytes(3 << 20))]
    with running(limit=2 << 20) as url:
        with pytest.raises(WireError, match=r"body=3145728 bytes must be at most 2097152; .*max_body_bytes") as caught:
            HttpClient(url).post_stream("/bulk", pieces, Ok)
        assert caught.value.status == 413
        with socket.create_connection(url.removeprefix("http://").split(":"), timeout=60) as sock:  # sends no body
            sock.sendall(POST_BULK + b"content-length: 9999999\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")
    with running(limit=2 << 20, inbox=Inbox(tmp_path)) as url:
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)
        with pytest.raises(WireError, match="body=3145728 bytes must be at most 2097152") as caught:
            client.post_stream("/bulk", pieces, Ok)
        assert caught.value.status == 413 and not list(tmp_path.iterdir())


def test_a_body_without_a_length_is_counted_while_it_comes() -> None:
    with running(limit=1 << 20) as url, socket.create_connection(url.removeprefix("http://").split(":"), 5) as sock:
        sock.sendall(POST_BULK + b"transfer-encoding: chunked\r\ncontent-type: ")
        sock.sendall(CONTENT_TYPE.encode() + b"\r\n\r\n")
        sock.sendall(b"%x\r\n" % ((1 << 20) + 1) + bytes((1 << 20) + 1))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream", "application/x-pickle", None])
def test_another_content_type_is_415(kind: str | None) -> None:
    with running() as url, pytest.raises(WireError, match=f"content-type={kind or 'none'} must be .*arrow") as caught:
        HttpClient(url)._send("POST", "/bulk", [memoryview(b"abc")], {"content-type": kind or ""})
    assert caught.value.status == 415


def test_an_inbox_that_the_client_does_not_see_takes_no_bodies(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.place = inbox.place.replace(":", ":1", 1)  # the inode of another directory
    NAMES.clear()
    with running(inbox=inbox) as url:
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)
        bulk_of(client, [memoryview(bytes(2 << 20))])
    assert NAMES == [None]


def test_a_name_that_was_used_up_is_sent_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NAMES.clear()
    with running(inbox=Inbox(tmp_path)) as url:
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)
        monkeypatch.setattr(client_module, "put", lambda place, pieces: "0" * 32)
        bulk_of(client, [memoryview(bytes(2 << 20))])
    assert NAMES == [None]


def test_a_connection_that_the_server_closed_while_idle_is_not_used() -> None:
    with running() as url:
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)
        port = int(url.rpartition(":")[2])
    sock = bind("127.0.0.1", port, "port")
    sock.close()
    assert client._pool._idle[0].stale


def test_answers_in_chunks_and_without_a_length_are_read_to_their_end() -> None:
    answers = [
        b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"ok"\r\n6\r\n:true}\r\n0\r\n\r\n',
        b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"ok":true}',
    ]
    sock = bind("127.0.0.1", 0, "port")

    def answer() -> None:
        for text in answers:
            connection, _ = sock.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(text)

    thread = threading.Thread(target=answer)
    thread.start()
    with closing(HttpClient(f"http://127.0.0.1:{sock.getsockname()[1]}", give_up_s=0.1)) as client:
        assert client.json("GET", "/", None, Ok).ok
        client._pool.close()
        assert client.json("GET", "/", None, Ok).ok
    thread.join(60)
    sock.close()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1_000_000, "the head of the answer is longer than 1048576 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 18446744073709551615\r\n\r\n{}", "is the length of no body"),
    ],
    ids=["head", "length"],
)
def test_an_answer_without_end_is_none(text: bytes, error: str) -> None:
    sock = bind("127.0.0.1", 0, "port")

    def answer() -> None:
        connection, _ = sock.accept()
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(text)

    thread = threading.Thread(target=answer)
    thread.start()
    with closing(sock), closing(HttpClient(f"http://127.0.0.1:{sock.getsockname()[1]}", give_up_s=0.0)) as client:
        with pytest.raises(WireError, match=error):
            client.json("GET", "/", None, Ok)
        thread.join(60)


def test_an_answer_comes_in_one_piece() -> None:
    class Line:
        get_extra_info = is_closing = pause_reading = resume_reading = set_protocol = None

        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def write(self, data: bytes | memoryview) -> None:
            self.sent.append(bytes(data))

        def close(self) -> None:
            self.sent.append(b"closed")

    line = Line()
    answers = OneWrite(line)
    for data in (b"HTTP/1.1 200 OK\r\n\r\n", b"one", b"two", b"HTTP/1.1 204 No Content\r\n\r\n", b""):
        answers.write(data)
    large = memoryview(bytes(100_000))
    for data in (b"HTTP/1.1 200 OK\r\n\r\n", large, large):
        answers.write(data)
    answers.write(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
    answers.close()
    assert line.sent == [
        b"HTTP/1.1 200 OK\r\n\r\none", b"two", b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n", large, large, b"HTTP/1.1 500 Internal Server Error\r\n\r\n", b"closed",
    ]  # fmt: skip
