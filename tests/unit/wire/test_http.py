"""Client and app against each other over a real socket."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import (
    DataflowError,
    JournalError,
    LaunchError,
    ProtocolMismatch,
    SchemaError,
    Unauthorized,
    Unreachable,
    WireError,
)
from astraflow.wire import client as client_module
from astraflow.wire.app import (
    MAX_BODY_BYTES,
    HttpError,
    StreamReply,
    bind,
    check_bind,
    create_app,
    json_reply,
    read_json,
    read_stream_body,
    serve,
)
from astraflow.wire.bulk import OneWrite
from astraflow.wire.client import HttpClient
from astraflow.wire.codec import CONTENT_TYPE, read_stream, stream_pieces
from astraflow.wire.local import BODY_HEADER, HOST_HEADER, Inbox, host_identity
from astraflow.wire.messages import Ok

NAMES: list[str | None] = []
"""Of the bodies of /bulk in the inbox; None: they came over the socket."""
PATHS: list[Path | None] = []
"""Where the bodies of /bulk lay; None: in memory."""
FULL = 0
"""How many requests the disk is still full for."""

AWAY = 0
"""How many requests the service still stops for."""


async def full(request: Request) -> Response:
    global FULL
    FULL -= 1
    if FULL >= 0:
        raise JournalError("journal", "x", "cannot be written", "free some disk")
    return json_reply(Ok())


async def away(request: Request) -> Response:
    global AWAY
    AWAY -= 1
    if AWAY >= 0:
        raise HttpError(503, "service=stopping answers nobody; ask again", pause_s=1)
    return json_reply(Ok())


async def echo(request: Request) -> Response:
    return json_reply(await read_json(request, Ok))


async def bulk(request: Request) -> Response:
    with await read_stream_body(request) as body:
        NAMES.append(request.headers.get(BODY_HEADER))
        PATHS.append(body.path)
        return StreamReply([memoryview(bytes(body.view))])


async def fail(request: Request) -> Response:
    raise {
        "state": DataflowError("batch", 7, "is not leased", "pull it first"),
        "disk": JournalError("journal", "x", "cannot be written", "free some disk"),
        "schema": SchemaError("column", "a", "is missing", "send it"),
        "gone": HttpError(410, "run=calculator is over; stop"),
    }[request.path_params["kind"]]


@contextmanager
def running(
    token: str | None = None,
    inbox: Inbox | None = None,
    limit: int = MAX_BODY_BYTES,
    fast: bool = True,
) -> Iterator[str]:
    routes = [
        Route("/echo", echo, methods=["POST"]),
        Route("/bulk", bulk, methods=["POST"]),
        Route("/fail/{kind}", fail),
        Route("/full", full, methods=["POST"]),
        Route("/away", away, methods=["POST"]),
    ]
    url: list[str] = []
    ready = threading.Event()
    loop = uvloop.new_event_loop() if fast else asyncio.new_event_loop()
    stop = asyncio.Event()

    def on_ready(text: str) -> None:
        url.append(text)
        ready.set()

    async def main() -> None:
        app = create_app(routes, token=token, inbox=inbox, max_body_bytes=limit)
        await serve(app, bind("127.0.0.1", 0, "port"), on_ready, stop, bulk=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


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


def bulk_of(client: HttpClient, pieces: list[memoryview]) -> tuple[int, memoryview, Mapping[str, str]]:
    """What POST /bulk gives back for these pieces, sent as the client sends an Arrow stream."""
    replies: list[tuple[int, memoryview, Mapping[str, str]]] = []
    send = client._send

    def kept(*args: Any) -> tuple[int, memoryview, Mapping[str, str]]:
        replies.append(send(*args))
        return 200, memoryview(b'{"ok":true}'), {}

    client._send = kept  # type: ignore[method-assign]
    try:
        client.post_stream("/bulk", pieces, Ok)
    finally:
        client._send = send  # type: ignore[method-assign]
    return replies[-1]


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
            stranger._send("POST", "/bulk", pieces, "text/plain", 0.0)
        assert len(bulk_of(stranger, pieces)[1]) == 8 << 20


@pytest.mark.parametrize("at", [0, 100_000, 6 << 20])
def test_a_large_body_that_is_cut_leaves_nothing_behind(at: int, tmp_path: Path) -> None:
    with running(inbox=Inbox(tmp_path)) as url:
        with socket.create_connection(url.removeprefix("http://").split(":"), timeout=5) as sock:
            head = (
                f"POST /bulk HTTP/1.1\r\nhost: x\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {8 << 20}\r\n\r\n"
            )
            sock.sendall(head.encode() + bytes(at))
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
        with socket.create_connection(url.removeprefix("http://").split(":"), timeout=5) as sock:  # sends no body
            sock.sendall(b"POST /bulk HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")
    with running(limit=2 << 20, inbox=Inbox(tmp_path)) as url:
        client = HttpClient(url)
        client.json("POST", "/echo", Ok(), Ok)
        with pytest.raises(WireError, match="body=3145728 bytes must be at most 2097152") as caught:
            client.post_stream("/bulk", pieces, Ok)
        assert caught.value.status == 413 and not list(tmp_path.iterdir())


def test_a_body_without_a_length_is_counted_while_it_comes() -> None:
    with running(limit=1 << 20) as url, socket.create_connection(url.removeprefix("http://").split(":"), 5) as sock:
        sock.sendall(b"POST /bulk HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-type: ")
        sock.sendall(CONTENT_TYPE.encode() + b"\r\n\r\n")
        sock.sendall(b"%x\r\n" % ((1 << 20) + 1) + bytes((1 << 20) + 1))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream", "application/x-pickle", None])
def test_another_content_type_is_415(kind: str | None) -> None:
    with running() as url, pytest.raises(WireError, match=f"content-type={kind or 'none'} must be .*arrow") as caught:
        HttpClient(url)._send("POST", "/bulk", [memoryview(b"abc")], kind or "", 0.0)
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
    thread.join(5)
    sock.close()


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        ("state", 409, "batch=7 is not leased; pull it first"),
        ("disk", 507, "journal=x cannot be written"),
        ("schema", 422, "column=a is missing"),
        ("gone", 410, "run=calculator is over; stop"),
    ],
)
def test_an_error_reaches_the_caller_as_the_same_sentence(kind: str, status: int, text: str) -> None:
    with running() as url, pytest.raises(WireError, match=text) as caught:
        HttpClient(url, give_up_s=0.1).json("GET", f"/fail/{kind}", None, Ok)
    assert caught.value.status == status


def test_a_body_of_another_shape_is_422_with_the_reason() -> None:
    with running() as url, pytest.raises(WireError, match="must be a Ok") as caught:
        HttpClient(url).post_bytes("/echo", b"[1]", Ok)
    assert caught.value.status == 422


def test_an_answer_of_another_shape_is_a_wire_error() -> None:
    with running() as url, pytest.raises(WireError, match="is this an AstraFlow service"):
        HttpClient(url).json("POST", "/echo", Ok(), list[int])


@pytest.mark.parametrize("token", [None, "wrong", "rightx"])
def test_a_missing_or_wrong_token_is_refused_and_never_repeated_in_the_message(token: str | None) -> None:
    with running("right") as url, pytest.raises(Unauthorized) as caught:
        HttpClient(url, token).json("POST", "/echo", Ok(), Ok)
    assert "ASTRAFLOW_TOKEN" in str(caught.value)
    assert "right" not in str(caught.value)


def test_the_right_token_is_let_in() -> None:
    with running("right") as url:
        assert HttpClient(url, "right").json("POST", "/echo", Ok(), Ok).ok


def test_another_protocol_version_is_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROTOCOL", 99)
    with running() as url, pytest.raises(ProtocolMismatch, match="protocol=99 must be 1"):
        HttpClient(url).json("POST", "/echo", Ok(), Ok)


def test_nobody_there_is_unreachable_within_the_budget() -> None:
    sock = bind("127.0.0.1", 0, "port")
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(Unreachable, match=rf"127.0.0.1:{port}/echo gave no answer in 0 s"):
        HttpClient(f"http://127.0.0.1:{port}", give_up_s=0.2).json("POST", "/echo", Ok(), Ok)


def test_a_peer_that_accepts_and_never_answers_is_unreachable() -> None:
    sock = bind("127.0.0.1", 0, "port")
    try:
        client = HttpClient(f"http://127.0.0.1:{sock.getsockname()[1]}", timeout_s=0.1, give_up_s=0.3)
        with pytest.raises(Unreachable):
            client.json("POST", "/echo", Ok(), Ok)
        assert client.num_retries >= 1
    finally:
        sock.close()


def test_a_url_without_a_scheme_is_refused_at_once() -> None:
    with pytest.raises(WireError, match="must start with http"):
        HttpClient("127.0.0.1:8000")


def test_eight_services_bind_port_zero_without_a_clash() -> None:
    socks = [bind("127.0.0.1", 0, "port") for _ in range(8)]
    assert len({s.getsockname()[1] for s in socks}) == 8
    for s in socks:
        s.close()


def test_a_used_port_is_named_with_its_setting() -> None:
    taken = bind("127.0.0.1", 0, "dataflow.port")
    port = taken.getsockname()[1]
    with pytest.raises(LaunchError, match=rf"dataflow.port=127.0.0.1:{port} cannot be bound .*; choose another port"):
        bind("127.0.0.1", port, "dataflow.port")
    taken.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org"])
def test_an_address_beyond_loopback_needs_a_token(host: str) -> None:
    with pytest.raises(LaunchError, match="is not loopback and there is no token"):
        check_bind(host, None, "dataflow.host")
    check_bind(host, "token", "dataflow.host")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    check_bind(host, None, "dataflow.host")


def test_a_pickle_sent_to_a_service_is_refused() -> None:
    bomb = b"cposix\nsystem\n(S'touch pwned'\ntR."
    with running() as url, socket.create_connection(url.removeprefix("http://").split(":"), timeout=5) as sock:
        sock.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb)
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 422")


def test_a_full_disk_is_waited_for_and_said_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as url:
        monkeypatch.setitem(globals(), "FULL", 2)
        client = HttpClient(url)
        assert client.json("POST", "/full", Ok(), Ok) == Ok()
        assert client.num_retries == 2
        monkeypatch.setitem(globals(), "FULL", 10**9)
        client = HttpClient(url, give_up_s=0.3)
        with pytest.raises(WireError, match="journal=x cannot be written") as caught:
            client.json("POST", "/full", Ok(), Ok)
        assert caught.value.status == 507 and client.num_retries > 0


def test_a_service_that_stops_is_asked_again_after_the_pause_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with running() as url:
        monkeypatch.setitem(globals(), "AWAY", 2)
        client = HttpClient(url)
        monkeypatch.setattr(client._stop, "wait", pauses.append)
        assert client.json("POST", "/away", Ok(), Ok) == Ok()
        assert client.num_retries == 2 and all(1.0 <= pause < 2.0 for pause in pauses)
        monkeypatch.setitem(globals(), "AWAY", 1)
        with pytest.raises(Unreachable, match="service=stopping answers nobody; ask again") as caught:
            HttpClient(url, give_up_s=0.5).json("POST", "/away", Ok(), Ok)  # no time left for the pause
    assert (caught.value.status, caught.value.pause_s) == (503, 1.0)


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
