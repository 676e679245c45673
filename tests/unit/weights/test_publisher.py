from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import WeightError
from astraflow.testing.weights import make_tensors, same_bits
from astraflow.weights.manifest import Manifest
from astraflow.weights.publisher import Backlog, Publisher
from astraflow.weights.store import FileStore


class SlowStore(FileStore):
    """Publishes one version for each `gate.release()`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "actor", durable=False)
        self.gate = threading.Semaphore(0)

    def publish(self, *args: Any, **kwargs: Any) -> Manifest:
        self.gate.acquire()
        return super().publish(*args, **kwargs)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowStore]:
    store = SlowStore(tmp_path)
    yield store
    for _ in range(9):
        store.gate.release()


def test_versions_become_visible_in_order_and_as_deltas(store: FileStore) -> None:
    publisher = Publisher(store)
    tensors = make_tensors()
    for version in range(3):
        publisher.submit(version, tensors)
    publisher.flush()
    assert store.versions() == [0, 1, 2]
    assert [info.base for info in store.infos().values()] == [-1, 0, 1]
    assert same_bits(store.fetch(2), tensors)
    publisher.close()


def test_deltas_are_a_setting(store: FileStore) -> None:
    publisher = Publisher(store, deltas=False)
    for version in range(2):
        publisher.submit(version, make_tensors())
    publisher.close()
    assert [info.base for info in store.infos().values()] == [-1, -1]


def test_only_a_whole_step_behind_makes_the_caller_wait(slow: SlowStore) -> None:
    publisher = Publisher(slow)
    publisher.submit(0, make_tensors())
    publisher.submit(1, make_tensors())  # neither is published, and this returned
    assert slow.versions() == []
    third = threading.Thread(target=publisher.submit, args=(2, make_tensors()))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    slow.gate.release()
    third.join(60)
    assert not third.is_alive()
    assert slow.versions() == [0]
    for _ in range(2):
        slow.gate.release()
    publisher.close()
    assert slow.versions() == [0, 1, 2]


def test_what_could_not_be_published_is_said_at_the_next_call(store: FileStore) -> None:
    store.publish(0, make_tensors(0))
    publisher = Publisher(store)
    publisher.submit(-1, make_tensors())
    with pytest.raises(WeightError, match="must be >= 0"):
        publisher.flush()
    publisher.submit(1, make_tensors(1))
    publisher.flush()
    assert store.versions() == [0, 1]
    publisher.close()


def test_a_version_is_published_also_when_one_before_it_could_not_be() -> None:
    backlog, may_fail, published = Backlog("test"), threading.Event(), []

    def fails() -> None:
        may_fail.wait(10)
        raise WeightError("disk", "full", "is full", "free some")

    backlog.add(fails)
    backlog.add(lambda: published.append(1))
    may_fail.set()
    with pytest.raises(WeightError, match="is full"):
        backlog.add(lambda: published.append(2))
    backlog.flush()
    backlog.close()
    assert published == [1, 2]


def test_a_trainer_that_trains_again_publishes_older_versions_than_the_store_has(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=2)
    tensors = make_tensors()
    for version in (6, 7, 8):
        store.publish(version, tensors)
    publisher = Publisher(store)
    publisher.submit(3, tensors)
    publisher.flush()
    assert store.versions() == [3, 7, 8]  # who resumes at 3 can fetch it
    publisher.submit(4, tensors)
    publisher.flush()
    assert 4 in store.versions()
    assert same_bits(store.fetch(4), tensors)
    publisher.close()
