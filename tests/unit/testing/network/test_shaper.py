"""The link with real sockets: what is counted, cut, refused and held up. Speed is not looked at here."""

from __future__ import annotations

import asyncio
import gc
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from urllib.parse import urlsplit

import pytest

from astraflow.errors import LaunchError
from astraflow.testing.network.__main__ import follow
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.shaper import Shaper
from astraflow.testing.runs import wait_until


class Echo(socketserver.BaseRequestHandler):
    """Each byte comes back; at the end of the input, `bye`."""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)
        self.request.sendall(b"bye")


@pytest.fixture
def service() -> Iterator[str]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def read(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (piece := sock.recv(1 << 16)):
        found += piece
    return found


def is_broken(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_arrive_unchanged_and_are_counted_for_each_service(service: str) -> None:
    content = bytes(range(256)) * 5000
    with Shaper(Conditions(bits_per_s=800e6, delay_s=0.001)) as link:
        one, other = link.forward(f"{service}/weights/actor"), link.forward(service)
        assert one.endswith("/weights/actor")
        with closing(connect(one)) as sock:
            threading.Thread(target=lambda: (sock.sendall(content), sock.shutdown(socket.SHUT_WR))).start()
            assert read(sock, len(content) + 4) == content + b"bye"
        with closing(connect(other)) as sock:
            sock.sendall(b"hello")
            assert read(sock, 5) == b"hello"
        seen = link.traffic(one)
        assert (seen.up, seen.down, seen.connections) == (len(content), len(content) + 3, 1)
        assert link.traffic(other).up == 5
        assert link.traffic().minus(seen).up == 5


def test_a_flipped_bit_arrives_once(service: str) -> None:
    with Shaper() as link:
        url = link.forward(service)
        link.flip(url, 3)
        with closing(connect(url)) as sock:
            for _ in range(2):
                sock.sendall(bytes(5))
            assert read(sock, 10) == bytes([0, 0, 0, 1, 0, 0, 0, 0, 0, 0])


def test_a_cut_breaks_connections_and_new_ones_may_be_made(service: str) -> None:
    with Shaper() as link:
        url = link.forward(service)
        with closing(connect(url)) as sock:
            sock.sendall(b"a")
            assert read(sock, 1) == b"a"
            link.cut()
            assert is_broken(sock)
        with closing(connect(url)) as sock:
            sock.sendall(b"b")
            assert read(sock, 1) == b"b"


def test_new_connections_are_refused_for_a_while_and_old_ones_stay(service: str) -> None:
    with Shaper() as link:
        url = link.forward(service)
        with closing(connect(url)) as old:
            old.sendall(b"a")
            assert read(old, 1) == b"a"
            link.refuse(3600)
            with closing(connect(url)) as new:
                assert is_broken(new)
            old.sendall(b"b")
            assert read(old, 1) == b"b"
        link.refuse(0)
        with closing(connect(url)) as new:
            new.sendall(b"c")
            assert read(new, 1) == b"c"
        assert link.traffic().refused == 1


def test_nothing_passes_a_stalled_link_and_nothing_is_lost(service: str) -> None:
    with Shaper() as link:
        url = link.forward(service)
        with closing(connect(url)) as sock:
            sock.sendall(b"a")
            assert read(sock, 1) == b"a"
            link.stall()
            sock.sendall(b"b")
            sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            with closing(connect(url)) as new:
                new.sendall(b"c")
                link.go_on()
                sock.settimeout(20)
                assert read(sock, 1) == b"b"
                assert read(new, 1) == b"c"


def test_what_is_sent_is_delayed_and_holds_up_nothing_behind_it(service: str) -> None:
    with Shaper() as link:
        url = link.forward(service)
        with closing(connect(url)) as sock:
            sock.sendall(b"a")
            assert read(sock, 1) == b"a"
            link.change(Conditions(delay_s=3600))
            for i in range(10):
                sock.sendall(bytes([i]))
            wait_until(lambda: link.traffic().up == 11, "all to be under way, though none is answered", 20)
            sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                sock.recv(1)


def test_a_receiver_that_takes_nothing_holds_up_its_sender_only(service: str) -> None:
    with Shaper(Conditions(window_bytes=1 << 16)) as link:
        url = link.forward(service)
        with closing(connect(url)) as lazy, closing(connect(url)) as busy:
            lazy.settimeout(0.3)
            with pytest.raises(TimeoutError):
                lazy.sendall(bytes(64 << 20))
            busy.sendall(b"x" * 1000)
            assert read(busy, 1000) == b"x" * 1000
        assert link.traffic().up < 64 << 20


def test_conditions_can_be_changed_and_a_wrong_service_is_refused(service: str) -> None:
    with Shaper(Conditions(bits_per_s=8)) as link:
        url = link.forward(service)
        link.change(Conditions())
        with closing(connect(url)) as sock:
            sock.sendall(b"x" * 100_000)
            assert len(read(sock, 100_000)) == 100_000
        with pytest.raises(LaunchError, match=r"link\.url=ftp://x"):
            link.forward("ftp://x")
        with pytest.raises(LaunchError, match=r"link\.port"):
            link.forward(service, port=urlsplit(url).port or 0)
        with closing(connect(link.forward("http://127.0.0.1:9"))) as sock:
            assert is_broken(sock), "nobody is behind it"


def test_words_steer_a_link(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Shaper() as link:
        link.forward(service)
        assert not follow(["mbit 100", "delay 75", "", "refuse 0", "stall", "go on", "cut", "mbit x", "jump"], link)
        assert link.conditions == Conditions(100e6, 0.075)
        assert follow(["traffic", "end", "mbit 1"], link)
    assert link.conditions.bits_per_s == 100e6
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("error: could not convert") and "word=jump is not known" in out[1]
    assert out[2] == '{"up":0,"down":0,"connections":0,"refused":0}'


def test_the_command_says_where_it_listens_and_ends(service: str) -> None:
    command = [sys.executable, "-m", "astraflow.testing.network", service, "--mbit", "100", "--delay-ms", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        given, _, url = process.stdout.readline().strip().partition(" -> ")
        assert given == service
        with closing(connect(url)) as sock:
            sock.sendall(b"hello")
            assert read(sock, 5) == b"hello"
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0


def test_connections_that_are_made_while_a_link_ends_are_closed() -> None:
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen(100)
        for _ in range(20):
            with ExitStack() as clients, Shaper() as link:
                door = urlsplit(link.forward(f"http://127.0.0.1:{service.getsockname()[1]}"))
                for _ in range(4):
                    clients.enter_context(socket.create_connection((door.hostname, door.port)))
        gc.collect()  # a socket that is open yet is an error of this test


def test_clients_that_go_on_connecting_while_a_link_ends_are_closed() -> None:
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen(100)
        with ExitStack() as clients, Shaper() as link:
            url = link.forward(f"http://127.0.0.1:{service.getsockname()[1]}")

            async def connecting() -> None:
                link._stop.set()
                with suppress(ConnectionRefusedError):
                    while True:
                        clients.enter_context(connect(url))
                        await asyncio.sleep(0)

            asyncio.run_coroutine_threadsafe(connecting(), link._loop)
        gc.collect()  # a socket that is open yet is an error of this test


def test_a_connection_that_is_cut_before_it_began_is_closed(service: str) -> None:
    with Shaper() as link:
        url = link.forward(service)

        async def cut_at_once() -> socket.socket:
            sock = connect(url)
            while not link._open:
                await asyncio.sleep(0)
            for task in link._open:
                task.cancel()
            return sock

        with closing(link._run(cut_at_once)) as sock:
            sock.settimeout(5)
            assert is_broken(sock)
