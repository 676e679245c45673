"""However a link or a store stalls, and whatever is asked for just then, a fetch ends within 600 s with the limits that
runs have. The real readers, over sockets and an object store that only turn a clock."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import fsspec
import msgspec
import pytest
from fsspec.asyn import get_loop
from fsspec.exceptions import FSTimeoutError

from astraflow.errors import WeightError
from astraflow.types import WeightVersion
from astraflow.weights import client as client_module
from astraflow.weights.app import Listing
from astraflow.weights.client import ANNOUNCED_WAIT_S, WeightClient
from astraflow.weights.fetch.http import HttpReader
from astraflow.weights.fetch.pace import MIN_BYTES_PER_S, Pace, SlowStore
from astraflow.weights.manifest import FileEntry
from astraflow.weights.objects import reader as reader_module
from astraflow.weights.objects.bucket import ANSWER_S, Bucket
from astraflow.weights.objects.layout import INDEX, Index
from astraflow.weights.objects.reader import MIN_CHUNK_BYTES, ObjectReader
from astraflow.weights.store import FileStore
from astraflow.wire import client as wire_client
from astraflow.wire import connection
from published import publish

LIMIT_S = 600.0
OBJECTS = "memory://bucket/run/actor?objects=id"


class Clock:
    """Turned by whoever waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float | None) -> None:
        assert seconds is not None and seconds >= 0, "every wait has an end"
        self.now += seconds


class Event:
    """A `threading.Event` that nobody sets."""

    clock: Clock

    def wait(self, seconds: float | None = None) -> bool:
        self.clock.wait(seconds)
        return False

    def set(self) -> None: ...


class Stall:
    """From the first request on whose path has `at`: nothing passes any more anywhere ("link"), or only such
    requests hang. `how`: "silent", "half" an answer and then nothing, "trickle": one byte now and then, "cut": one byte
    of a part, then the connection is closed."""

    def __init__(self, clock: Clock, at: str, how: str, link: bool) -> None:
        self.clock, self.at, self.how, self.link = clock, at, how, link
        self.begun: float | None = None

    def holds(self, path: str) -> bool:
        hit = re.search(self.at, path.partition("?")[0]) is not None
        if hit and self.begun is None:
            self.begun = self.clock.now
        return hit or (self.link and self.begun is not None)

    @property
    def over_all(self) -> bool:
        return self.link and self.begun is not None


class Wire:
    """A connection to a server of the versions of `store`."""

    def __init__(self, store: FileStore, stall: Stall, timeout_s: float) -> None:
        self._store, self._stall, self._timeout_s = store, stall, timeout_s
        if stall.over_all and stall.how != "cut":
            self._out_of_time()
        self._coming, self._held = b"", b""

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def sendmsg(self, pieces: list[memoryview]) -> int:
        request = b"".join(pieces).decode()
        path, start = request.split(" ")[1], re.search(r"range: bytes=(\d+)-", request)
        body = self._body(path)[int(start[1]) if start else 0 :]
        head = f"HTTP/1.1 {206 if start else 200} OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self._coming, self._held = head + body, b""
        if self._stall.holds(path):
            some = {"half": len(head) + len(body) // 2, "cut": len(head) + 1}.get(self._stall.how, 0)
            self._coming, self._held = self._coming[:some], self._coming[some:]
        return sum(map(len, pieces))

    def recv(self, most: int) -> bytes:
        if not self._coming and self._stall.how == "trickle" and self._held:
            self._stall.clock.wait(self._timeout_s - 1.0)
            self._coming, self._held = self._held[:1], self._held[1:]
        if not self._coming and self._stall.how != "cut":
            self._out_of_time()
        came, self._coming = self._coming[:most], self._coming[most:]
        return came

    def recv_into(self, target: memoryview, most: int) -> int:
        came = self.recv(most)
        target[: len(came)] = came
        return len(came)

    def setsockopt(self, *words: Any) -> None: ...

    def close(self) -> None: ...

    def _out_of_time(self) -> None:
        self._stall.clock.wait(self._timeout_s)
        raise TimeoutError("timed out")

    def _body(self, path: str) -> bytes:
        parts = path.partition("?")[0].split("/")[3:]
        if path == "/health":
            return b"{}"
        if "/delta?base=" in path:
            return msgspec.json.encode(self._store.merged(int(parts[0]), int(path.rpartition("=")[2])))
        if not parts:
            infos = self._store.infos()
            return msgspec.json.encode(Listing("actor", max(infos), list(infos.values())))
        return self._store.directory.joinpath(*parts).read_bytes()


class Objects:
    """An fsspec file system, asynchronous as those of clouds are, with the versions of `store`."""

    async_impl = True

    def __init__(self, store: FileStore, stall: Stall) -> None:
        self._store, self._stall, self.loop = store, stall, get_loop()

    def cat_file(self, path: str, start: int, end: int, timeout: float) -> bytes:
        self._pass(path, timeout)
        if path.endswith(INDEX):
            return msgspec.json.encode(Index("id", tuple(self._store.infos().values())))
        try:
            return (self._store.directory / path.partition("actor/")[2]).read_bytes()[start:end]
        except OSError as error:
            raise FileNotFoundError(path) from error

    async def _cat_file(self, path: str, start: int, end: int) -> bytes:
        begun = self._stall.clock.now
        await asyncio.sleep(0)  # others begin at the same time
        if self._stall.holds(path):
            self._stall.clock.now = max(self._stall.clock.now, begun + ANSWER_S)
            raise TimeoutError
        return self.cat_file(path, start, end, ANSWER_S)

    def pipe_file(self, path: str, content: bytes, timeout: float) -> None:
        self._pass(path, timeout)

    def rm_file(self, path: str, timeout: float) -> None:
        self._pass(path, timeout)

    def _pass(self, path: str, timeout: float) -> None:
        if self._stall.holds(path):
            self._stall.clock.wait(timeout)
            raise FSTimeoutError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Event, "clock", clock, raising=False)
    monkeypatch.setattr(time, "monotonic", clock)
    for module in (client_module, wire_client):
        monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Event, Lock=threading.Lock))
    return clock


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FileStore:
    """Full: version 0, changes: 1 to 3."""
    place = tmp_path_factory.mktemp("source")
    (place / "config.json").write_text('{"a": "' + 3000 * "b" + '"}')
    made = FileStore(place / "weights", "actor", full_every=50)
    publish(made, range(4), (place / "config.json",))
    return made


@pytest.fixture
def stalled(source: FileStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stall]]:
    def begin(at: str, how: str, link: bool) -> Stall:
        stall = Stall(clock, at, how, link)
        sockets = SimpleNamespace(
            create_connection=lambda address, timeout_s: Wire(source, stall, timeout_s), IPPROTO_TCP=0, TCP_NODELAY=0
        )
        monkeypatch.setattr(connection, "socket", sockets)
        monkeypatch.setattr(connection.Connection, "stale", property(lambda self: stall.over_all))
        monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **o: (Objects(source, stall), urlsplit(url).path))
        return stall

    yield begin


def urls_of(servers: int, objects: int) -> tuple[str, ...]:
    return (*(f"http://h{i}:80/weights/actor" for i in range(servers)), *[OBJECTS] * objects)


REQUESTS = {
    "the manifest": "/3/manifest.json",
    "the listing": "/actor$|index.json",
    "a manifest on the way": "/0/manifest.json",
    "the merged delta, a lease": "/delta$|/readers/",
    "a part": ".safetensors$",
    "a delta": ".bin$",
    "a file": "config.json",
}


@pytest.mark.parametrize("stores", [(1, 0), (0, 1), (1, 1), (3, 1), (8, 0)], ids=str)
@pytest.mark.parametrize("how", ["silent", "half", "trickle", "cut"])
@pytest.mark.parametrize("link", [True, False], ids=["the link", "those requests"])
@pytest.mark.parametrize("at", REQUESTS)
def test_a_fetch_that_stalls_ends_in_time(
    source: FileStore, clock: Clock, stalled: Callable[..., Stall], stores: tuple[int, int], how: str, link: bool,
    at: str,
) -> None:  # fmt: skip
    held = None
    if at not in ("a manifest on the way", "a part"):
        held = WeightClient().fetch(WeightVersion("actor", 1, (source.url,)))
    client = WeightClient(wait_s=ANNOUNCED_WAIT_S)
    stall, error = stalled(REQUESTS[at], how, link), ""
    try:
        client.fetch(WeightVersion("actor", 3, urls_of(*stores)), held)
    except WeightError as failure:
        error = str(failure)
    assert stall.begun is not None, "nothing was asked for there"
    assert 0 < clock.now - stall.begun < LIMIT_S
    if at == "the merged delta, a lease" and not link and stores[1]:
        assert not error, "an object store merges nothing, and can be read without a lease"
        return
    if at == "a delta" and how == "cut" and not error:
        return  # it is so small that it comes byte by byte
    assert "could not be fetched from any store" in error
    assert re.search("no byte came|gave no answer|fewer than .* bytes/s|s are allowed|was cut", error), error
    assert all(url.partition("?")[0] in error for url in urls_of(*stores)), error


def test_one_silent_try_is_enough_while_another_store_was_not_tried(
    source: FileStore, clock: Clock, stalled: Callable[..., Stall]
) -> None:
    stalled(".safetensors$", "silent", False)
    reader = HttpReader(wire_client.HttpClient("http://h:80"), "/weights/actor", "actor", leave=True)
    begun = clock.now
    with pytest.raises(SlowStore, match="another store is there"):
        reader.read(0, source.manifest(0).parts[0])
    assert clock.now - begun == 30.0


@pytest.mark.parametrize("how", ["silent", "half", "trickle"])
@pytest.mark.parametrize("at", ["the manifest", "the listing", "a delta"])
def test_a_relay_that_copies_ends_in_time(
    source: FileStore, clock: Clock, stalled: Callable[..., Stall], tmp_path: Path, how: str, at: str
) -> None:
    store = FileStore(tmp_path, "actor", durable=False)
    stalled("nothing of this", how, True)
    WeightClient().copy(WeightVersion("actor", 1, urls_of(1, 1)), store)
    stall = stalled(REQUESTS[at], how, True)
    with pytest.raises(WeightError, match="could not be fetched from any store"):
        WeightClient(wait_s=ANNOUNCED_WAIT_S).copy(WeightVersion("actor", 3, urls_of(2, 1)), store, lambda: None)
    assert stall.begun is not None and clock.now - stall.begun < LIMIT_S


@pytest.mark.parametrize(("chunks", "served"), [(1, False), (2, True)])
def test_an_object_store_that_gives_a_chunk_now_and_then_is_given_up(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int, served: bool
) -> None:
    """One of the smallest in the time of an answer is 182 bytes/s."""
    content = bytes(range(256)) * 2048

    def ranges(self: Bucket, name: str, spans: list[tuple[int, int]]) -> list[bytes | WeightError]:
        clock.wait(ANSWER_S)
        late = WeightError("object", name, "could not be read", "wait")
        return [content[start:stop] if at < chunks else late for at, (start, stop) in enumerate(spans)]

    monkeypatch.setattr(Bucket, "ranges", ranges)
    monkeypatch.setattr(reader_module, "FIRST_CHUNK_BYTES", MIN_CHUNK_BYTES)
    reader = ObjectReader(f"file://{tmp_path}/actor", "actor", closed=Event())  # type: ignore[arg-type]
    begun = clock.now
    if served:
        assert bytes(reader.read(0, FileEntry("a", len(content), "x"))) == content
        return
    with pytest.raises(WeightError, match=r"part a=\d+ bytes comes with fewer than 250 bytes/s in \d+ s"):
        reader.read(0, FileEntry("a", len(content), "x"))
    assert clock.now - begun < 200.0


def test_chunks_that_came_behind_one_that_did_not_are_not_asked_for_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, came = bytes(range(256)) * 2048, list[int]()

    def ranges(self: Bucket, name: str, spans: list[tuple[int, int]]) -> list[bytes | WeightError]:
        late = WeightError("object", name, "could not be read", "wait")
        found = [late if not came and at == 1 else content[start:stop] for at, (start, stop) in enumerate(spans)]
        came.extend(byte for f, span in zip(found, spans, strict=True) if f is not late for byte in range(*span))
        return found

    monkeypatch.setattr(Bucket, "ranges", ranges)
    monkeypatch.setattr(reader_module, "FIRST_CHUNK_BYTES", 8 * MIN_CHUNK_BYTES)
    reader = ObjectReader(f"file://{tmp_path}/actor", "actor", closed=Event())  # type: ignore[arg-type]
    assert bytes(reader.read(0, FileEntry("a", len(content), "x"))) == content
    assert sorted(came) == list(range(len(content))), "each byte came once"


def test_bytes_that_come_again_are_bytes_that_came(clock: Clock) -> None:
    """A server that knows no Range begins at the first byte at each try, each time further."""
    ends = [40_000, 44_000, 48_000, 60_000]

    class Restarting:
        timeout_s, base_url = 30.0, "http://h:80"

        def download(
            self, path: str, target: memoryview, offset: int, on_piece: Callable[[int], None], on_head: Any
        ) -> int:
            end = ends.pop(0)
            for filled in range(1000, end + 1, 1000):
                clock.wait(3.5)  # 285 bytes/s
                on_piece(filled)
            return end

    reader = HttpReader(Restarting(), "/weights/actor", "actor", closed=Event())  # type: ignore[arg-type]
    assert len(reader.read(0, FileEntry("a", 60_000, "x"))) == 60_000 and not ends


def test_a_slow_link_is_served_and_a_trickle_is_not(clock: Clock) -> None:
    slow = Pace("part a", 30.0)
    for _ in range(3600):
        clock.wait(1.0)
        slow.came(1000)
    with pytest.raises(WeightError, match=r"part a=36\d+ bytes comes with fewer than 250 bytes/s in 150 s; check"):
        for _ in range(301):  # whatever came before
            clock.wait(1.0)
            slow.came(int(MIN_BYTES_PER_S) - 1)


def test_another_store_is_tried_after_one_limit(clock: Clock) -> None:
    pace = Pace("part a", 30.0, leave=True)
    pace.look()
    clock.wait(29.0)
    pace.came(9999)
    clock.wait(1.0)
    with pytest.raises(SlowStore, match="another store is there"):
        pace.look()


def test_the_time_until_the_first_byte_is_no_measure(clock: Clock) -> None:
    """A store may let us wait for a version."""
    pace = Pace("answer", 30.0, leave=True)
    clock.wait(3600.0)
    pace.came(1)


def test_more_bytes_than_a_document_has_are_refused(clock: Clock) -> None:
    pace = Pace("answer", 30.0, most=1000)
    pace.came(1000)
    with pytest.raises(WeightError, match="answer=1001 bytes must have 1000 at most"):
        pace.came(1)
