from __future__ import annotations

import os
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from astraflow.errors import WeightError
from astraflow.testing.weights import make_tensors, same_bits, serving_weights
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch import http as http_reader
from astraflow.weights.fetch.pace import SlowStore
from astraflow.weights.fetch.spool import Spooled
from astraflow.weights.files.build import Base
from astraflow.weights.manifest import MANIFEST
from astraflow.weights.plan import VersionInfo
from astraflow.weights.store import FileStore


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightClient]:
    monkeypatch.setattr(http_reader, "_PAUSE_S", 0.0)
    made = WeightClient(timeout_s=5.0, give_up_s=0.3)
    yield made
    made.close()


class Faults:
    """A store over HTTP that misbehaves as told. `ranges` are the Range headers it was sent for parts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cut_at: list[int] = []  # each part request in turn: close the connection after so many bytes
        self.flip: list[bool] = []  # each part request in turn: damage a byte
        self.lies: dict[str, bytes] = {}  # end of a path -> answered instead
        self.trickles = 0  # part requests that get a few bytes now and then
        self.drips = ""  # end of a path -> answered a byte at a time, 20 in a second
        self.knows_ranges = True
        self.ranges: list[str | None] = []
        self.requests: list[str] = []


@contextmanager
def faulty(faults: Faults) -> Iterator[str]:
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            faults.requests.append(self.path)
            lie = next((body for end, body in faults.lies.items() if self.path.endswith(end)), None)
            path = faults.directory.joinpath(*self.path.split("/")[3:])
            if lie is not None:
                self.send_response(200)
                self.send_header("content-length", str(len(lie)))
                self.end_headers()
                self.wfile.write(lie)
                return
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            start = 0
            if path.suffix == ".safetensors":
                asked = self.headers.get("range")
                faults.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and faults.knows_ranges else 0
                if faults.flip and faults.flip.pop(0):
                    content = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if faults.drips and self.path.endswith(faults.drips):
                self.close_connection = True
                with suppress(OSError):
                    for at in range(len(body)):
                        self.wfile.write(body[at : at + 1])
                        gone.wait(0.05)
                return
            if path.suffix == ".safetensors" and faults.trickles:
                faults.trickles -= 1
                self.close_connection = True
                with suppress(OSError):
                    for at in range(0, len(body), 200):  # 4 kB/s
                        self.wfile.write(body[at : at + 200])
                        gone.wait(0.05)
                return
            if path.suffix == ".safetensors" and faults.cut_at:
                body = body[: faults.cut_at.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/weights/actor"
        finally:
            gone.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def published(store: FileStore, tmp_path: Path) -> FileStore:
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    store.publish(3, make_tensors(), [tmp_path / "config.json"])
    return store


def test_the_file_store_on_this_host_is_used_first(published: FileStore, client: WeightClient) -> None:
    faults = Faults(published.directory)
    with faulty(faults) as url:
        fetched = client.fetch(WeightVersion("actor", 3, (published.url, url)))
    assert same_bits(fetched.tensors, make_tensors())
    assert fetched.files == {"config.json": b'{"hidden_size": 16}'}
    assert faults.requests == []


@pytest.mark.parametrize("elsewhere", ["absent", "another"])
def test_a_path_of_another_host_is_passed_over(
    published: FileStore, client: WeightClient, tmp_path: Path, elsewhere: str
) -> None:
    file_url = f"file://{tmp_path}/absent/actor?store=abc"
    if elsewhere == "another":  # the same path, but another run wrote there
        other = FileStore(tmp_path / "other", "actor")
        other.publish(3, make_tensors(9))
        file_url = other.url.partition("?")[0] + "?store=abc"
    with serving_weights(published.directory.parent) as url:
        fetched = client.fetch(WeightVersion("actor", 3, (file_url, f"{url}/weights/actor")))
    assert same_bits(fetched.tensors, make_tensors())


def test_the_trainers_directory_is_not_read_where_nothing_is_to_be_shared(
    published: FileStore, client: WeightClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_SHARED_MEMORY", "0")
    faults = Faults(published.directory)
    with faulty(faults) as url:
        fetched = client.fetch(WeightVersion("actor", 3, (published.url, url)))
    assert same_bits(fetched.tensors, make_tensors()) and len(faults.ranges) == 1
    with pytest.raises(WeightError, match="ASTRAFLOW_SHARED_MEMORY=0"):
        client.fetch(WeightVersion("actor", 3, (published.url,)))
    given = published.url.partition("?")[0]  # no trainer's own: somebody means this very directory
    assert same_bits(client.fetch(WeightVersion("actor", 3, (given,))).tensors, make_tensors())


def test_what_comes_over_http_is_what_was_published(published: FileStore, client: WeightClient, tmp_path: Path) -> None:
    with serving_weights(published.directory.parent) as url:
        fetched = client.fetch(WeightVersion("actor", 3, (f"{url}/weights/actor",)))
    assert fetched.version == 3
    assert list(fetched.tensors) == list(make_tensors())
    assert same_bits(fetched.tensors, make_tensors())
    fetched.tensors["layer.0.weight"].zero_()  # writable: the caller's own
    fetched.save_files(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_bytes() == b'{"hidden_size": 16}'


def test_files_are_fetched_once(published: FileStore, client: WeightClient) -> None:
    published.publish(4, make_tensors(4), [published.files(3)["config.json"]])
    faults = Faults(published.directory)
    with faulty(faults) as url:
        first = client.fetch(WeightVersion("actor", 3, (url,)))
        second = client.fetch(WeightVersion("actor", 4, (url,)))
    assert first.files == second.files
    assert sum(path.endswith("config.json") for path in faults.requests) == 1


def test_a_cut_download_goes_on_where_it_ended(published: FileStore, client: WeightClient) -> None:
    faults = Faults(published.directory)
    faults.cut_at = [700, 300, 0, 900]
    with faulty(faults) as url:
        fetched = client.fetch(WeightVersion("actor", 3, (url,)))
    assert same_bits(fetched.tensors, make_tensors())
    assert faults.ranges == [None, "bytes=700-", "bytes=1000-", "bytes=1000-", "bytes=1900-"]
    assert client.counts["retries"] == 4


def test_a_download_that_never_goes_on_is_given_up(published: FileStore, client: WeightClient) -> None:
    faults = Faults(published.directory)
    faults.cut_at = [700] + [0] * 50
    with faulty(faults) as url, pytest.raises(WeightError, match="could not be fetched from any store"):
        client.fetch(WeightVersion("actor", 3, (url,)))
    assert len(faults.ranges) < 10


def test_what_a_reader_had_of_a_part_is_not_fetched_again_by_the_next_process(
    published: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_reader, "MIN_BYTES", 0)
    monkeypatch.setattr(http_reader, "_PAUSE_S", 0.0)
    wanted = partial(WeightVersion, "actor", 3)
    faults = Faults(published.directory)
    faults.cut_at = [700] + [0] * 50
    with faulty(faults) as url:
        with pytest.raises(WeightError):
            WeightClient(give_up_s=0.3, spool=tmp_path / "spool").fetch(wanted((url,)))
        faults.cut_at.clear()
        faults.ranges.clear()
        fetched = WeightClient(spool=tmp_path / "spool").fetch(wanted((url,)))
    assert faults.ranges == ["bytes=700-"]
    assert same_bits(fetched.tensors, make_tensors())
    assert list((tmp_path / "spool").iterdir()) == []
    fetched.tensors["layer.0.weight"].zero_()


def test_two_readers_of_one_part_do_not_wait_for_each_other(
    published: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_reader, "MIN_BYTES", 0)
    part = published.manifest(3).parts[0]
    faults = Faults(published.directory)
    with faulty(faults) as url, Spooled(tmp_path / "spool", part.xxh3, part.nbytes):
        fetched = WeightClient(spool=tmp_path / "spool").fetch(WeightVersion("actor", 3, (url,)))
    assert same_bits(fetched.tensors, make_tensors())


@pytest.mark.parametrize("name", ["../victim", "", "A" * 32, "a" * 31, "a" * 33])
def test_what_is_no_checksum_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    for given in (name, str(tmp_path / "victim")):
        with pytest.raises(WeightError, match="must be 32 hex digits"):
            Spooled(tmp_path / "spool", given, 100)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_what_nobody_came_back_for_is_removed(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "new").touch()
    os.utime(tmp_path / "old", (0, 0))
    WeightClient(spool=tmp_path).close()
    assert [item.name for item in tmp_path.iterdir()] == ["new"]


def test_a_torn_part_is_fetched_again(published: FileStore, client: WeightClient) -> None:
    faults = Faults(published.directory)
    faults.flip = [True, True, False]
    with faulty(faults) as url:
        fetched = client.fetch(WeightVersion("actor", 3, (url,)))
    assert same_bits(fetched.tensors, make_tensors())
    assert client.counts["torn_parts"] == 2


def test_a_store_whose_parts_stay_torn_is_left_for_the_next(published: FileStore, client: WeightClient) -> None:
    bad, good = Faults(published.directory), Faults(published.directory)
    bad.flip = [True] * 50
    with faulty(bad) as bad_url, faulty(good) as good_url:
        client._chooser._probe = lambda base: 0.0 if bad_url.startswith(base) else 0.1
        fetched = client.fetch(WeightVersion("actor", 3, (bad_url, good_url)))
    assert same_bits(fetched.tensors, make_tensors())
    assert client.counts["failed_stores"] == 1


def _as_listed(*infos: VersionInfo) -> bytes:
    return msgspec.json.encode({"policy": "actor", "latest": 9, "versions": [], "infos": infos})


LIES = {
    "html for a manifest": {MANIFEST: b"<html>sign in</html>"},
    "html for a listing": {"/actor": b"<html>sign in</html>"},
    "nothing for a listing": {"/actor": b"null"},
    "deep": {"/actor": b'{"a":' + b"[" * 10_000},
    "a listing in circles": {"/actor": _as_listed(VersionInfo(6, -1, 6))},
    "a base that comes later": {"/actor": _as_listed(VersionInfo(6, -1, 7))},
    "negative bytes": {"/actor": _as_listed(VersionInfo(6, -2, 5, -3))},
    "full in the listing only": {"/actor": _as_listed(VersionInfo(6, 0, 5, 9))},
    "another base in the listing": {"/actor": _as_listed(VersionInfo(6, -1, 3, 9))},
    "html for a delta": {"delta?base=3": b"<html>sign in</html>"},
    "a path for a checksum": {"delta?base=3": b'{"base":3,"parts":[{"name":"x","nbytes":9999999,"xxh3":"/tmp/x"}]}'},
    "a file of negative size": {MANIFEST: b'"files":[{"name":"config.json","nbytes":-7,'},
    "a file of huge size": {MANIFEST: b'"files":[{"name":"config.json","nbytes":99999999999999999,'},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_store_that_answers_nonsense_costs_only_itself(
    store: FileStore, client: WeightClient, tmp_path: Path, lie: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    base = None
    for version in range(3, 7):
        tensors = {"w": torch.arange(40_000.0)}
        tensors["w"][:version] += 0.5
        content = store.publish(version, tensors, [tmp_path / "config.json"], base=base)
        base = Base(version, tensors, {entry.name: entry.xxh3 for entry in content.tensors})
    held = client.fetch(WeightVersion("actor", 3, (store.url,)))
    bad = Faults(store.directory)
    bad.lies = {"/actor": _as_listed(*store.infos().values())} | LIES[lie]
    if lie.startswith("a file"):
        true = (store.directory / "6" / MANIFEST).read_bytes()
        bad.lies |= {MANIFEST: re.sub(rb'"files":\[{"name":"config.json","nbytes":\d+,', LIES[lie][MANIFEST], true)}
    with faulty(bad) as bad_url, serving_weights(store.directory.parent) as good_url:
        client._chooser._probe = lambda base: 0.0 if bad_url.startswith(base) else 0.1
        fetched = client.fetch(WeightVersion("actor", 6, (bad_url, f"{good_url}/weights/actor")), held)
    assert same_bits(fetched.tensors, {"w": tensors["w"]})
    assert any(path.endswith(end) for path in bad.requests for end in LIES[lie]), "the lie was told"
    assert client.counts["failed_stores"] == 1


@pytest.mark.parametrize(
    "url", ["http://[::1/weights/actor", "http://127.0.0.1:99999/weights/actor", "http://127.0.0.1:9\u2028/weights/actor",
            " http://127.0.0.1:9/weights/actor", "http://user:password@127.0.0.1:9/weights/actor", "http:///actor"],
)  # fmt: skip
def test_a_url_that_is_none_costs_only_its_store(published: FileStore, client: WeightClient, url: str) -> None:
    wanted = WeightVersion("actor", 3, (url, published.url))
    assert same_bits(client.fetch(wanted).tensors, make_tensors())
    with pytest.raises(WeightError, match="could not be fetched") as caught:
        client.fetch(WeightVersion("actor", 3, (url,)))
    assert "password" not in str(caught.value)
    with pytest.raises(WeightError, match="could not be fetched"):
        client.copy(WeightVersion("actor", 3, (url,)), published)


@pytest.mark.parametrize("fault", ["no room", "no directory"])
def test_without_a_place_for_it_a_part_comes_into_memory(
    published: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(http_reader, "MIN_BYTES", 0)
    place = tmp_path / "spool"
    if fault == "no room":
        monkeypatch.setattr("os.posix_fallocate", full, raising=False)
        monkeypatch.setattr("os.ftruncate", full)
    else:
        place.touch()
    with faulty(Faults(published.directory)) as url:
        fetched = WeightClient(give_up_s=0.3, spool=place).fetch(WeightVersion("actor", 3, (url,)))
    assert same_bits(fetched.tensors, make_tensors())


def test_a_store_that_trickles_is_left_while_others_were_not_tried(
    published: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_reader, "MIN_BYTES", 0)
    slow, good = Faults(published.directory), Faults(published.directory)
    slow.trickles = 1
    client = WeightClient(timeout_s=0.2, give_up_s=0.3, spool=tmp_path / "spool")
    with faulty(slow) as slow_url, faulty(good) as good_url:
        client._chooser._probe = lambda base: 0.0 if slow_url.startswith(base) else 0.1
        fetched = client.fetch(WeightVersion("actor", 3, (slow_url, good_url)))
        assert same_bits(fetched.tensors, make_tensors())
        assert good.ranges[0] is not None, "what came from the slow one is not fetched again"
        assert client._chooser.is_broken(slow_url)
        slow.trickles, slow.ranges = 1, []
        nowhere = "http://127.0.0.1:9/weights/actor"
        client._chooser._probe = lambda base: 0.0 if slow_url.startswith(base) else 0.1
        client._chooser._seen.clear()
        fetched = client.fetch(WeightVersion("actor", 3, (slow_url, nowhere)))
        assert len(slow.ranges) == 2, "when all others failed it is asked again"
        slow.trickles, slow.ranges = 1, []
        assert same_bits(client.fetch(WeightVersion("actor", 3, (slow_url,))).tensors, make_tensors())
        assert len(slow.ranges) == 1, "alone it may be as slow as it is"
    client.close()


def test_a_slow_store_is_asked_again_before_those_that_do_not_answer(client: WeightClient) -> None:
    """They cost a minute each, and stores are not asked for ever."""
    urls, asked = ["http://slow/actor", "http://dead/actor", "http://empty/actor"], list[tuple[str, bool]]()
    client._chooser.failed("http://dead/actor")

    def attempt(url: str, leave: bool) -> str:
        asked.append((url, leave))
        if url == urls[0] and leave:
            raise SlowStore("part", "1 bytes", "comes slowly", "wait")
        if url == urls[2]:
            raise WeightError("version", 3, "is not there", "wait")
        return url

    assert client._from_one(WeightVersion("actor", 3, tuple(urls)), urls, attempt, []) == urls[0]
    assert asked == [(urls[0], True), (urls[2], True), (urls[0], False)]


@pytest.mark.parametrize("drips", [MANIFEST, "model.safetensors"])
def test_a_store_that_drips_is_given_up_though_each_byte_is_progress(published: FileStore, drips: str) -> None:
    client, faults = WeightClient(timeout_s=0.2, give_up_s=0.1), Faults(published.directory)
    faults.drips = drips
    with faulty(faults) as url, pytest.raises(WeightError, match=r"bytes comes with fewer than 250 bytes/s in 1 s"):
        client.fetch(WeightVersion("actor", 3, (url,)))
    client.close()


def test_a_server_that_knows_no_ranges_makes_no_progress_by_beginning_again(
    published: FileStore, client: WeightClient
) -> None:
    faults = Faults(published.directory)
    faults.knows_ranges = False
    faults.cut_at = [300, 700, 500, 300, 500]
    with faulty(faults) as url:
        assert same_bits(client.fetch(WeightVersion("actor", 3, (url,))).tensors, make_tensors())
        faults.cut_at, faults.ranges = [300, 700] + [500, 300] * 50, []
        with pytest.raises(WeightError, match="no byte came in 4 tries"):
            client.fetch(WeightVersion("actor", 3, (url,)))
    assert len(faults.ranges) == 6


def test_the_error_names_every_store(published: FileStore, client: WeightClient, tmp_path: Path) -> None:
    part = published.directory / "3" / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    urls = (published.url, "http://127.0.0.1:9/weights/actor", f"file://{tmp_path}/absent/actor", "ftp://x/actor")
    with pytest.raises(WeightError) as caught:
        client.fetch(WeightVersion("actor", 3, urls))
    text = str(caught.value)
    for url in ("checksum", "127.0.0.1:9", "absent", "ftp"):
        assert url in text


def test_a_truncated_part_on_the_server_is_found(published: FileStore, client: WeightClient) -> None:
    part = published.directory / "3" / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    with serving_weights(published.directory.parent) as url, pytest.raises(WeightError):
        client.fetch(WeightVersion("actor", 3, (f"{url}/weights/actor",)))


def test_a_torn_manifest_is_fetched_again_then_refused(published: FileStore, client: WeightClient) -> None:
    manifest = published.directory / "3" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-20])
    faults = Faults(published.directory)
    with faulty(faults) as url, pytest.raises(WeightError, match="is not a manifest"):
        client.fetch(WeightVersion("actor", 3, (url,)))
    assert len(faults.requests) > 1


def test_a_version_that_is_gone_is_said(published: FileStore, client: WeightClient) -> None:
    with (
        serving_weights(published.directory.parent) as url,
        pytest.raises(WeightError, match="fetch the newest version"),
    ):
        client.fetch(WeightVersion("actor", 1, (f"{url}/weights/actor",)))


@pytest.mark.parametrize("wanted", [WeightVersion("actor", -1), WeightVersion("actor", 0)])
def test_a_version_without_a_place_is_refused(client: WeightClient, wanted: WeightVersion) -> None:
    with pytest.raises(WeightError, match="has not been published"):
        client.fetch(wanted)


def test_a_url_of_another_policy_is_refused(published: FileStore, client: WeightClient) -> None:
    with pytest.raises(WeightError, match="must end with /critic"):
        client.fetch(WeightVersion("critic", 3, (published.url,)))


def test_many_threads_share_one_client(published: FileStore, client: WeightClient) -> None:
    results: list[bool] = []
    with serving_weights(published.directory.parent) as url:
        wanted = WeightVersion("actor", 3, (f"{url}/weights/actor",))

        def fetch() -> None:
            results.append(same_bits(client.fetch(wanted).tensors, make_tensors()))

        threads = [threading.Thread(target=fetch) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 12
