"""Parts that come in pieces, slowly, or from the first byte again."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from astraflow.errors import WeightError
from astraflow.testing.weights import make_tensors, same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch import http as http_reader
from astraflow.weights.fetch.pace import SlowStore
from astraflow.weights.fetch.spool import Spooled
from astraflow.weights.manifest import MANIFEST
from astraflow.weights.store import FileStore
from faulty_store import Faults, faulty


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


@pytest.mark.parametrize("lie", [MANIFEST, "/actor"])
def test_a_document_without_an_end_is_not_read_to_its_end(
    published: FileStore, client: WeightClient, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(http_reader, "MAX_DOCUMENT_BYTES", 100_000)
    faults = Faults(published.directory)
    faults.lies = {lie: b" " * 200_000}
    with faulty(faults) as url:
        reader = client._reader(url, WeightVersion("actor", 3, (url,)))
        assert reader is not None
        with pytest.raises(WeightError, match=r"bytes must have 100000 at most; ask another store"):
            reader.infos() if lie == "/actor" else reader.manifest(3)
