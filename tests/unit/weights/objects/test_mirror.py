"""The thread that copies versions: in order, off the step, whatever the store does."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astraflow.errors import WeightError
from astraflow.testing.runs import wait_until
from astraflow.testing.weights import same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.objects import mirror as mirror_module
from astraflow.weights.objects.bucket import Bucket
from astraflow.weights.objects.layout import INDEX, read_index
from astraflow.weights.objects.mirror import Mirror
from astraflow.weights.store import FileStore
from published import model, publish

Start = Callable[..., Mirror]


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def start(source: FileStore, memory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(mirror_module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(mirror_module, "_MAX_PAUSE_S", 0.05)
    made: list[Mirror] = []

    def go(base: str = memory, **options: object) -> Mirror:
        made.append(Mirror(source, base, **options))  # type: ignore[arg-type]
        return made[-1]

    yield go
    for mirror in made:
        mirror.close()
        assert not mirror._thread.is_alive()


def indexed(base: str) -> list[int]:
    return [info.version for info in read_index(Bucket(f"{base}/actor").get(INDEX), "").infos]


def test_versions_come_as_they_are_published_and_are_told_of(base: str, source: FileStore, start: Start) -> None:
    told: list[tuple[str, int]] = []
    mirror = start(base, on_change=lambda m: told.append((m.url, m.version)))
    assert mirror.flush(20.0)
    for version in range(5):
        mirror.announce(version)  # as a trainer does: it is still being encoded
        publish(source, range(version, version + 1))
        assert mirror.flush(20.0)
        assert mirror.version == version
    assert [version for _, version in told] == [-1, 0, 1, 2, 3, 4]
    assert mirror.stats["mirror_behind"] == mirror.stats["mirror_failures"] == mirror.stats["mirror_skipped"] == 0
    assert mirror.stats["mirror_bytes"] > 5 * 65_536
    client = WeightClient()
    assert same_bits(client.fetch(WeightVersion("actor", 4, (mirror.url,))).tensors, model(4))
    client.close()
    wait_until(lambda: indexed(base) == [2, 3, 4], "what is not kept to leave the index", 20)


def test_a_mirror_that_comes_late_copies_what_the_newest_rests_on(source: FileStore, start: Start, memory: str) -> None:
    source.keep = 0
    publish(source, range(7))  # full: 0, 4
    mirror = start()
    assert mirror.flush(20.0)
    assert indexed(memory) == [4, 5, 6]
    assert mirror.num_skipped == 0  # nobody waited for those before


def test_a_mirror_that_comes_late_copies_nothing_else(source: FileStore, start: Start, memory: str) -> None:
    source.keep, source.full_every = 0, 1
    publish(source, range(3))
    mirror = start()
    assert mirror.flush(20.0)
    assert indexed(memory) == [2]


def test_a_restarted_mirror_goes_on_and_skips_what_nobody_needs(source: FileStore, start: Start, memory: str) -> None:
    source.keep = 0
    publish(source, range(3))
    first = start()
    assert first.flush(20.0)
    first.close()
    url = first.url
    publish(source, range(3, 11))  # the first after a restart is whole: 3, 7
    again = start()
    assert again.flush(20.0)
    assert again.url == url
    assert indexed(memory) == [0, 1, 2, 7, 8, 9, 10]
    assert again.num_skipped == 4
    assert again.stats["mirror_skipped"] == 4


def test_a_failing_store_is_warned_of_once_counted_and_tried_again(
    source: FileStore, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "astraflow.weights.objects.mirror")
    works = threading.Event()
    put = Bucket.put

    def fails(self: Bucket, name: str, content: bytes) -> None:
        if not works.is_set():
            raise WeightError("object", name, "could not be written", "check the store")
        put(self, name, content)

    monkeypatch.setattr(Bucket, "put", fails)
    publish(source, range(2))
    mirror = start()
    wait_until(lambda: mirror.num_failures >= 4, "failures to be counted", 20)
    assert (mirror.url, mirror.version) == ("", -1)  # nothing to announce
    assert not mirror.flush(20.0)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    works.set()
    wait_until(lambda: mirror.version == 1, "the store to be used again", 20)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert mirror.stats["mirror_failures"] >= 4


def test_a_version_that_is_not_there_is_not_the_newest(
    source: FileStore, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(source, range(1))
    told: list[int] = []
    mirror = start(on_change=lambda m: told.append(m.version))
    assert mirror.flush(20.0)

    def fails(self: Bucket, name: str, file: Path) -> None:
        raise WeightError("object", name, "could not be written", "check the store")

    monkeypatch.setattr(Bucket, "put_file", fails)
    publish(source, range(1, 2))
    mirror.announce(1)
    wait_until(lambda: mirror.num_failures >= 2, "failures to be counted", 20)
    assert set(told) == {-1, 0}
    assert mirror.stats["mirror_behind"] == 1


def test_a_version_that_is_not_in_the_index_is_put_again(
    source: FileStore, start: Start, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = start()
    assert mirror.flush(20.0)
    fails, put = [True, True], Bucket.put

    def flaky(self: Bucket, name: str, content: bytes) -> None:
        if name == INDEX and fails and fails.pop():
            raise WeightError("object", name, "could not be written", "check the store")
        put(self, name, content)

    monkeypatch.setattr(Bucket, "put", flaky)
    publish(source, range(1))
    mirror.announce(0)
    wait_until(lambda: mirror.version == 0, "the version to be there", 20)
    assert indexed(memory) == [0]
    assert mirror.num_failures == 2


def test_nobody_waits_for_a_mirror_that_hangs(source: FileStore, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "_JOIN_S", 0.1)
    hangs, reached = threading.Event(), threading.Event()
    upload = Bucket.put_file

    def hang(self: Bucket, name: str, file: Path) -> None:
        reached.set()
        hangs.wait(30.0)
        upload(self, name, file)

    monkeypatch.setattr(Bucket, "put_file", hang)
    publish(source, range(2))
    mirror = Mirror(source, memory)
    assert reached.wait(60.0)
    publish(source, range(2, 6))
    mirror.announce(5)
    assert not mirror.flush(0.1)
    stop = threading.Event()
    stop.set()
    assert not mirror.flush(60.0, stop)
    mirror.close()
    hangs.set()
    mirror._thread.join(60.0)
    assert mirror.version == -1  # what was on its way is given up
    with pytest.raises(WeightError):
        Bucket(f"{memory}/actor").get("0/manifest.json")


def test_a_mirror_that_dies_of_our_own_fault_ends_the_trainer(source: FileStore, start: Start) -> None:
    def broken(mirror: Mirror) -> None:
        raise KeyError("a fault of ours")

    publish(source, range(1))
    mirror = start(on_change=broken)
    with pytest.raises(WeightError, match="stopped with KeyError: 'a fault of ours'"):
        mirror.flush(20.0)
    with pytest.raises(WeightError, match="start the trainer again"):
        mirror.announce(1)
