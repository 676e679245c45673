"""Versions in an object store: written by a trainer, fetched by nodes and relays."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from astraflow.errors import WeightError
from astraflow.testing.weights import same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch.route import Counts, bring
from astraflow.weights.objects import reader as reader_module
from astraflow.weights.objects.bucket import Bucket, MissingObject
from astraflow.weights.objects.layout import INDEX, is_object_store, read_index, split_store_url, store_url
from astraflow.weights.objects.reader import ObjectReader
from astraflow.weights.objects.writer import ObjectWriter
from astraflow.weights.plan import Pins
from astraflow.weights.store import FileStore
from published import model, publish


class Place:
    """A bucket with the versions of a store in it."""

    def __init__(self, base: str, source: FileStore, keep: int = 0) -> None:
        self.base, self.source = f"{base}/actor", source
        self.bucket = Bucket(self.base)
        self.writer = ObjectWriter(self.bucket, "actor", keep=keep, pins=source.pins)
        self.writer.open(source)

    @property
    def url(self) -> str:
        return store_url(self.base, self.writer.store_id)

    def add(self, *versions: int) -> None:
        for version in versions:
            self.writer.add(self.source, version)
            self.writer.retire(version)

    def reader(self) -> ObjectReader:
        return ObjectReader(self.url, "actor")

    def indexed(self) -> list[int]:
        return [info.version for info in read_index(self.bucket.get(INDEX), "").infos]

    def folders(self) -> list[int]:
        return sorted({int(n.partition("/")[0]) for n in self.bucket.names() if n[0].isdigit()})


@pytest.fixture
def place(base: str, source: FileStore) -> Place:
    source.keep = 0
    publish(source, range(4))
    made = Place(base, source)
    made.add(0, 1, 2, 3)
    return made


def test_a_full_version_and_a_chain_of_deltas_come_back_bit_for_bit(place: Place) -> None:
    reader = place.reader()
    assert reader.infos() == place.source.infos()
    assert [info.full_nbytes >= 0 for info in reader.infos().values()] == [True, False, False, False]
    counts = Counts()
    held = bring(reader, None, 0, counts=counts)
    assert same_bits(held.tensors, model(0))
    assert (counts.deltas, counts.nbytes) == (0, place.source.infos()[0].full_nbytes)
    counts = Counts()
    held = bring(reader, held, 3, counts=counts)  # a passive store merges nothing: three deltas
    assert same_bits(held.tensors, model(3))
    assert (counts.deltas, counts.nbytes) == (3, sum(place.source.infos()[v].delta_nbytes for v in (1, 2, 3)))
    assert same_bits(bring(reader, None, 2).tensors, model(2))


def test_a_node_fetches_with_files_and_passes_over_a_store_of_another_host(
    base: str, source: FileStore, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    publish(source, range(2), (tmp_path / "config.json",))
    place = Place(base, source)
    place.add(0, 1)
    client = WeightClient(give_up_s=0.1)
    elsewhere = store_url(place.base, "another")
    fetched = client.fetch(WeightVersion("actor", 0, (elsewhere, place.url)))
    assert fetched.files == {"config.json": b"{}"}
    fetched = client.fetch(WeightVersion("actor", 1, ("http://127.0.0.1:9/weights/actor", place.url)), fetched)
    assert same_bits(fetched.tensors, model(1))
    assert client.counts["deltas"] == 1
    with pytest.raises(WeightError, match="is not on this host"):
        WeightClient().fetch(WeightVersion("actor", 1, (elsewhere,)))
    with pytest.raises(WeightError, match="must end with /critic"):
        client.fetch(WeightVersion("critic", 1, (place.url,)))
    client.close()


def test_who_reaches_only_an_object_store_waits_there_and_not_at_servers_that_never_answer(
    base: str, source: FileStore
) -> None:
    publish(source, range(3))
    place, client = Place(base, source), WeightClient(give_up_s=0.1, wait_s=20.0)
    place.add(0)
    server = "http://127.0.0.1:9/weights/actor"
    held = client.fetch(WeightVersion("actor", 0, (server, place.url)))
    assert client._candidates("actor", (server,)) == [place.url, server]
    assert client._candidates("actor", ("http://other/actor", server)) == ["http://other/actor", place.url, server]
    later = threading.Timer(0.3, lambda: place.add(1))
    later.start()
    failed = client.counts["failed_stores"]
    held = client.fetch(WeightVersion("actor", 1, (server,)), held)  # not told of the store: it does not have it yet
    later.join()
    assert same_bits(held.tensors, model(1))
    assert client.counts["failed_stores"] == failed
    place.bucket.remove_folder("1")
    with pytest.raises(WeightError, match="is not in"):
        client.fetch(WeightVersion("actor", 1, (place.url,)))
    assert client._candidates("actor", (server,)) == [server]
    client.close()


def test_a_relay_copies_from_it_as_it_travels(place: Place, tmp_path: Path) -> None:
    relay, client = FileStore(tmp_path / "relay", "actor"), WeightClient()
    for version in (0, 1, 3):
        assert client.copy(WeightVersion("actor", version, (place.source.url, place.url)), relay) == place.url
    client.close()
    assert relay.versions() == [0, 1, 2, 3]
    assert same_bits(relay.fetch(3), model(3))


def test_a_read_that_is_cut_goes_on_where_it_ended_in_the_next_process_too(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MIN_BYTES", 0)
    for name in ("MIN_CHUNK_BYTES", "FIRST_CHUNK_BYTES", "CHUNK_BYTES"):
        monkeypatch.setattr(reader_module, name, 10_000)
    monkeypatch.setattr(reader_module, "CHUNKS_AT_ONCE", 2)
    monkeypatch.setattr(reader_module, "_PAUSE_S", 0.0)
    asked: list[tuple[int, int]] = []
    fails: list[int | None] = [None, 1, 0, 0, 0]  # which range of each request does not come
    whole = Bucket.ranges

    def flaky(self: Bucket, name: str, spans: list[tuple[int, int]]) -> list[bytes | WeightError]:
        asked.extend(spans)
        found = whole(self, name, spans)
        if fails and (missing := fails.pop(0)) is not None:
            found[missing] = WeightError("object", name, "was cut", "ask again")
        return found

    monkeypatch.setattr(Bucket, "ranges", flaky)
    retries: list[None] = []
    first = ObjectReader(place.url, "actor", spool=tmp_path / "spool", on_retry=lambda: retries.append(None))
    part = first.manifest(0).parts[0]
    with pytest.raises(WeightError, match="was cut"):
        first.read(0, part)
    starts = [start for start, _ in asked]
    assert starts == [*range(0, 40_000, 10_000), 30_000, 40_000, 30_000, 50_000, 30_000, 60_000]
    assert len(retries) == 3
    asked.clear()
    content = ObjectReader(place.url, "actor", spool=tmp_path / "spool").read(0, part)
    assert [start for start, _ in asked] == [30_000, 40_000, 50_000, 60_000]
    assert bytes(content) == (place.source.directory / "0" / part.name).read_bytes()
    assert list((tmp_path / "spool").iterdir()) == []


def test_requests_are_as_large_as_the_link_answers_in_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("MIN_CHUNK_BYTES", 500), ("FIRST_CHUNK_BYTES", 1000), ("CHUNK_BYTES", 4000)):
        monkeypatch.setattr(reader_module, name, size)
    monkeypatch.setattr(reader_module, "_PAUSE_S", 0.0)
    asked, fails, whole = list[tuple[int, int]](), {4, 5}, Bucket.ranges

    def limited(self: Bucket, name: str, spans: list[tuple[int, int]]) -> list[bytes | WeightError]:
        asked.append((len(spans), spans[0][1] - spans[0][0]))
        return [WeightError("object", name, "a", "b")] if len(asked) in fails else whole(self, name, spans)

    monkeypatch.setattr(Bucket, "ranges", limited)
    reader = place.reader()
    part = reader.manifest(0).parts[0]
    content = reader.read(0, part)
    assert asked[:9] == [
        (4, 1000),
        (4, 2000),
        (4, 4000),
        (4, 4000),
        (4, 500),
        (4, 500),
        (4, 1000),
        (4, 2000),
        (4, 4000),
    ]
    assert bytes(content) == (place.source.directory / "0" / part.name).read_bytes()


def test_a_damaged_or_cut_part_is_never_used(place: Place) -> None:
    name = next(name for name in place.bucket.names("1") if "delta" in name)
    content = bytearray(place.bucket.get(name))
    content[len(content) // 2] ^= 1
    place.bucket.put(name, bytes(content))
    held = bring(place.reader(), None, 0)
    counts = Counts()
    with pytest.raises(WeightError, match="checksum"):
        bring(place.reader(), held, 1, counts=counts)
    assert same_bits(held.tensors, model(0))
    assert counts.torn_parts > 0
    place.bucket.put(name, bytes(content[:-3]))
    with pytest.raises(WeightError, match="is cut"):
        bring(place.reader(), held, 1)


def test_a_version_deleted_under_its_reader_is_said(place: Place) -> None:
    reader = place.reader()
    manifest = reader.manifest(0)
    place.bucket.remove_folder("0")
    with pytest.raises(WeightError, match=r"actor version=0 is not in .*; it has 0 to 3; fetch the newest"):
        reader.read(0, manifest.parts[0])


def test_a_version_that_comes_is_waited_for_and_one_that_is_gone_is_not(place: Place) -> None:
    publish(place.source, range(3, 5))
    later = threading.Timer(0.3, lambda: place.add(4))
    later.start()
    assert place.reader().manifest(4, wait_s=20.0).version == 4
    later.join()
    place.bucket.remove_folder("1")
    with pytest.raises(WeightError, match="is not in"):
        place.reader().manifest(1, wait_s=600.0)
    closed = threading.Event()
    closed.set()
    with pytest.raises(WeightError, match="is not in"):
        ObjectReader(place.url, "actor", closed=closed).manifest(9, wait_s=600.0)


def test_what_is_not_kept_leaves_the_index_first_and_goes_later(base: str, source: FileStore) -> None:
    source.keep = 0
    publish(source, range(10))  # full: 0, 4, 8
    place = Place(base, source, keep=3)
    place.add(*range(7))
    assert place.indexed() == [4, 5, 6]
    assert place.folders() == [0, 1, 2, 3, 4, 5, 6]  # 0 to 3 left the index just now
    place.add(7)
    assert place.folders() == place.indexed() == [4, 5, 6, 7]
    assert same_bits(bring(place.reader(), None, 6).tensors, model(6))


def test_a_lease_keeps_a_version_and_what_it_rests_on(base: str, source: FileStore) -> None:
    source.keep = 0
    publish(source, range(12))
    place = Place(base, source, keep=1)
    place.add(0, 1, 2)
    with place.reader().reading(2):
        place.add(4, 5, 8, 9)
        assert place.indexed() == [0, 1, 2, 8, 9]
        assert same_bits(bring(place.reader(), None, 2).tensors, model(2))
    place.add(10, 11)
    assert place.folders() == [8, 9, 10, 11]


def test_a_lease_that_comes_while_a_version_is_leaving_keeps_it(base: str, source: FileStore) -> None:
    source.keep = 0
    publish(source, range(9))
    place = Place(base, source, keep=1)
    place.add(0, 4)
    assert (place.indexed(), place.folders()) == ([4], [0, 4])
    with place.reader().reading(0):
        place.add(8)
        assert place.indexed() == [0, 8]


def test_a_pinned_version_stays(base: str, tmp_path: Path) -> None:
    source = FileStore(tmp_path / "pinned", "actor", keep=0, full_every=1, pins=Pins(frozenset({0})))
    publish(source, range(5))
    place = Place(base, source, keep=1)
    place.add(*range(5))
    assert place.indexed() == [0, 4]


@pytest.mark.parametrize("at", ["a part", "the manifest", "the index"])
def test_a_crash_in_the_middle_leaves_what_was_there_and_the_next_writer_sweeps(
    place: Place, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    publish(place.source, range(3, 6))
    before = place.bucket.names()

    class Killed(BaseException): ...

    def kill(self: Bucket, name: str, *rest: object) -> None:
        raise Killed

    put = Bucket.put
    with monkeypatch.context() as patch:
        if at == "a part":
            patch.setattr(Bucket, "put_file", kill)
            place.bucket.put("4/model.safetensors", b"half")
        elif at == "the manifest":
            patch.setattr(Bucket, "put", kill)
        else:
            patch.setattr(
                Bucket, "put", lambda self, name, c: kill(self, name) if name == INDEX else put(self, name, c)
            )
        with pytest.raises(Killed):
            place.writer.add(place.source, 4)
    assert place.indexed() == [0, 1, 2, 3]
    assert ("4/manifest.json" in place.bucket.names()) == (at == "the index")
    assert same_bits(bring(place.reader(), None, 3).tensors, model(3))
    again = ObjectWriter(place.bucket, "actor", keep=0)
    again.open(place.source)
    assert again.store_id == place.writer.store_id
    if at == "the index":  # it was whole
        assert again.versions == place.indexed() == [0, 1, 2, 3, 4]
    else:
        assert place.bucket.names() == before
    again.add(place.source, 4)
    assert same_bits(bring(place.reader(), None, 4).tensors, model(4))


def test_a_writer_removes_versions_of_another_past_and_all_after_them(place: Place, tmp_path: Path) -> None:
    other = FileStore(tmp_path / "other", "actor", keep=0)
    publish(other, range(2))
    other.publish(2, model(9))
    again = ObjectWriter(place.bucket, "actor", keep=0)
    again.open(other)
    assert again.versions == place.folders() == place.indexed() == [0, 1]


def test_a_manifest_that_is_damaged_or_misses_a_part_is_removed(place: Place) -> None:
    place.bucket.put("2/manifest.json", b"{")
    place.bucket.remove_folder("3")
    place.bucket.copy("1/manifest.json", "3/manifest.json")
    place.bucket.put("7/half", b"-")
    place.bucket.put(".tmp-abc", b"-")
    again = ObjectWriter(place.bucket, "actor", keep=0)
    again.open(place.source)
    assert again.versions == place.folders() == [0, 1]
    assert ".tmp-abc" not in place.bucket.names()


def test_a_damaged_index_is_made_anew(place: Place) -> None:
    place.bucket.put(INDEX, b"{")
    with pytest.raises(WeightError, match="is not an index"):
        place.reader().infos()
    place.writer.open(place.source)
    assert place.indexed() == [0, 1, 2, 3]


def test_files_that_did_not_change_are_copied_by_the_store(
    base: str, source: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    publish(source, range(2), (tmp_path / "config.json",))
    place, sent = Place(base, source), list[str]()
    upload = Bucket.put_file
    monkeypatch.setattr(Bucket, "put_file", lambda self, name, file: (sent.append(name), upload(self, name, file)))
    place.add(0, 1)
    assert sent == ["0/model.safetensors", "0/config.json", "1/delta-00000.bin"]
    assert place.bucket.get("1/config.json") == b"{}"


def test_a_reader_who_may_not_write_still_reads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Bucket, name: str, content: bytes) -> None:
        raise WeightError("object", name, "could not be written (PermissionError)", "check the credentials")

    monkeypatch.setattr(Bucket, "put", refuse)
    assert same_bits(bring(place.reader(), None, 3).tensors, model(3))


def test_a_store_of_somebody_else_needs_no_index(place: Place) -> None:
    place.bucket.remove(INDEX)
    foreign = ObjectReader(place.base, "actor")
    assert foreign.is_meant()
    assert foreign.infos() == {}
    assert same_bits(bring(foreign, None, 0).tensors, model(0))
    assert not place.reader().is_meant()
    with pytest.raises(WeightError, match="it has none"):
        foreign.manifest(9)


def test_urls_of_object_stores_are_told_apart() -> None:
    assert is_object_store("s3://b/p/actor")
    assert is_object_store("file:///mnt/run/actor?objects=ab")
    assert not is_object_store("file:///run/weights/actor?store=ab")
    assert not is_object_store("https://host/weights/actor")
    assert split_store_url(store_url("s3://b/actor", "ab")) == ("s3://b/actor", "ab")


def test_an_unreadable_object_may_be_missing(tmp_path: Path) -> None:
    error = Bucket(tmp_path.as_uri())._failed("read", "x", PermissionError("403"))
    assert isinstance(error, MissingObject)
    assert "not ours to read" in str(error)
