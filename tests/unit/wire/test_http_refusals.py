"""Errors, tokens, addresses, and services that are not there, over a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest
import urllib3

import http_service
from astraflow.errors import (
    LaunchError,
    ProtocolMismatch,
    Unauthorized,
    Unreachable,
    WireError,
)
from astraflow.wire import client as client_module
from astraflow.wire.app import (
    bind,
    check_bind,
)
from astraflow.wire.client import HttpClient
from astraflow.wire.messages import PROTOCOL_HEADER, Ok
from http_service import running


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
        HttpClient(url)._send("POST", "/echo", [memoryview(b"[1]")], {"content-type": "application/json"})
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


@pytest.mark.parametrize(
    ("headers", "status", "problem"),
    [
        ({"content-type": "application/json"}, 426, "x-astraflow-protocol=none must be 1; send that header"),
        ({"content-type": "application/json", PROTOCOL_HEADER: ""}, 426, "x-astraflow-protocol= must be 1"),
        ({"content-type": "text/plain", PROTOCOL_HEADER: "1"}, 415, "content-type=text/plain must be application/json"),
        ({PROTOCOL_HEADER: "1"}, 415, "content-type=none must be application/json"),
        ({"content-type": "Application/JSON; charset=utf-8", PROTOCOL_HEADER: "1"}, 200, ""),
    ],
)
def test_what_a_web_page_of_another_origin_can_send_is_refused(
    headers: dict[str, str], status: int, problem: str
) -> None:
    with running() as url:
        answer = urllib3.request("POST", url + "/echo", body=b'{"ok":true}', headers=headers, retries=False)
        assert answer.status == status and problem in answer.data.decode()
        assert urllib3.request("GET", url + "/health", retries=False).status == 200


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


@pytest.mark.parametrize("length", ["transfer-encoding: chunked", f"content-length: {10**15}"])
def test_of_an_error_without_an_end_so_much_is_read(length: str) -> None:
    sent, over = list[int](), threading.Event()

    def answer(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(2):
                sock, _ = listening.accept()
                with sock, contextlib.suppress(OSError):
                    sent.append(0)
                    sock.recv(1 << 16)
                    sock.sendall(f"HTTP/1.1 500 x\r\n{length}\r\n\r\n".encode())
                    while not over.is_set() and sent[-1] < 256:
                        sock.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                        sent[-1] += 1

    listening = bind("127.0.0.1", 0, "port")
    listening.listen()
    thread = threading.Thread(target=answer, args=(listening,))
    thread.start()
    client = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}", give_up_s=0.2)
    try:
        with pytest.raises(WireError, match=r"/echo answered 500 with 1048576 bytes or more; is this"):
            client.json("POST", "/echo", Ok(), Ok)
        with pytest.raises(WireError, match=r"/part answered 500 with 1048576 bytes or more; is this"):
            client.download("/part", memoryview(bytearray(10)))
        assert client._pool._idle == [], "nothing more can be asked for on these connections"
    finally:
        over.set()
        listening.close()
        thread.join(60)
    assert not thread.is_alive() and len(sent) == 2 and max(sent) < 256, "the rest was not read"


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
    with pytest.raises(LaunchError, match=r"dataflow.port=127.0.0.1:99999 cannot be bound .*; choose another port"):
        bind("127.0.0.1", 99999, "dataflow.port")


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
    with running() as url, socket.create_connection(url.removeprefix("http://").split(":"), timeout=60) as sock:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\nx-astraflow-protocol: 1\r\ncontent-type: application/json\r\n"
        sock.sendall(head + b"content-length: %d\r\n\r\n" % len(bomb) + bomb)
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 422")


def test_a_full_disk_is_waited_for_and_said_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as url:
        monkeypatch.setattr(http_service, "FULL", 2)
        client = HttpClient(url)
        assert client.json("POST", "/full", Ok(), Ok) == Ok()
        assert client.num_retries == 2
        monkeypatch.setattr(http_service, "FULL", 10**9)
        client = HttpClient(url, give_up_s=0.3)
        with pytest.raises(WireError, match="journal=x cannot be written") as caught:
            client.json("POST", "/full", Ok(), Ok)
        assert caught.value.status == 507 and client.num_retries > 0


def test_a_service_that_stops_is_asked_again_after_the_pause_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with running() as url:
        monkeypatch.setattr(http_service, "AWAY", 2)
        client = HttpClient(url)
        monkeypatch.setattr(client._stop, "wait", pauses.append)
        assert client.json("POST", "/away", Ok(), Ok) == Ok()
        assert client.num_retries == 2 and all(1.0 <= pause < 2.0 for pause in pauses)
        monkeypatch.setattr(http_service, "AWAY", 1)
        with pytest.raises(Unreachable, match="service=stopping answers nobody; ask again") as caught:
            HttpClient(url, give_up_s=0.5).json("POST", "/away", Ok(), Ok)  # no time left for the pause
    assert (caught.value.status, caught.value.pause_s) == (503, 1.0)
