"""A relay between a trainer's store and its nodes, found through a real dataflow service."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import LaunchError, WeightError, WireError
from astraflow.testing.dataflow import policy_section, small_config, sources
from astraflow.testing.runs import wait_until
from astraflow.testing.services import DataflowThread, serving_weights
from astraflow.testing.weights import same_bits
from astraflow.types import WeightVersion
from astraflow.weights import relay as relay_module
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch.copy import copy_version
from astraflow.weights.files.build import Base
from astraflow.weights.publisher import Publisher
from astraflow.weights.relay import Follower, RelayOptions, run_relay
from astraflow.weights.store import FileStore
from astraflow.wire import messages as m


def model(version: int) -> dict[str, torch.Tensor]:
    weights = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weights[:version] += 1
    return {"w": weights}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[DataflowThread]:
    changes = {"heartbeat_s": 0.05, "dead_after_s": 1.0}
    config = small_config(run__steps=9, dataflow=changes, policies__actor=policy_section(2, 1))
    with DataflowThread(config, tmp_path / "run", sources=sources()) as started:
        yield started


@contextmanager
def relaying(url: str, directory: Path, **options: Any) -> Iterator[None]:
    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            run_relay(url, RelayOptions(directory, **options), token=None, stop=stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert failures == []


def stores(service: DataflowThread) -> WeightVersion:
    """What a node is told."""
    with_client = DataflowClient(service.url)
    run_id = with_client.run().run_id
    join = m.Join(node_id="n", name="n", capacity=1, run_id=run_id)
    told = with_client.join(join).versions["actor"]
    with_client.close()
    return told


def test_a_relay_copies_what_is_announced_and_nodes_are_told_of_it(service: DataflowThread, tmp_path: Path) -> None:
    origin = FileStore(tmp_path / "weights", "actor")
    publisher = Publisher(origin)
    publisher.submit(0, model(0))
    publisher.flush()
    client = DataflowClient(service.url)
    run_id = client.run().run_id
    with serving_weights(tmp_path / "weights") as url:

        def announce(version: int) -> None:
            resume = m.Resume(trainer_id="t", version=version, urls=(f"{url}/weights/actor",), run_id=run_id)
            client.resume("actor", resume)

        announce(0)
        assert len(stores(service).urls) == 1
        with relaying(service.url, tmp_path / "relay"):
            wait_until(lambda: len(stores(service).urls) == 2, "the relay to be told of", 20)
            relay = stores(service).urls[1]
            nodes = WeightClient(wait_s=20.0)
            held = nodes.fetch(WeightVersion("actor", 0, (relay,)))
            publisher.submit(1, model(1))
            publisher.flush()
            service.call(lambda: setattr(service.shell.machine.state.policies["actor"], "latest", 1))
            held = nodes.fetch(WeightVersion("actor", 1, (relay,)), held)
            assert same_bits(held.tensors, model(1))
            assert nodes.counts["deltas"] == 1
            nodes.close()
        wait_until(lambda: len(stores(service).urls) == 1, "the relay to be forgotten", 20)
    copied = FileStore(tmp_path / "relay" / run_id, "actor")
    assert [(info.version, info.base) for info in copied.infos().values()] == [(0, -1), (1, 0)]
    publisher.close()
    client.close()


def test_a_relay_is_told_of_a_version_at_once(service: DataflowThread) -> None:
    client = DataflowClient(service.url)
    run_id = client.run().run_id

    def ask(known: int, wait_s: float) -> int:
        told = m.Relay(run_id=run_id, url="http://10.0.0.1:80", known={"actor": known}, wait_s=wait_s)
        return client.relay("r", told).versions["actor"].version

    assert ask(-1, 0.0) == -1
    assert ask(7, 3600.0) == -1, "what it knows is not what there is: it is told without a wait"
    news = threading.Timer(
        0.2,
        service.call,
        [lambda: setattr(service.shell.machine.state.policies["actor"], "latest", 1)],
    )
    news.start()
    assert ask(-1, 3600.0) == 1
    news.join()
    client.close()


def test_what_cannot_be_a_relay_is_refused(service: DataflowThread, tmp_path: Path) -> None:
    client = DataflowClient(service.url)
    run_id = client.run().run_id
    with pytest.raises(WireError, match="is not this run"):
        client.relay("r", m.Relay(run_id="another", url="http://10.0.0.1:80"))
    with pytest.raises(WireError, match="url='ftp://x' must be http"):
        client.relay("r", m.Relay(run_id=run_id, url="ftp://x"))
    client.close()
    with pytest.raises(LaunchError, match="token"):
        run_relay(service.url, RelayOptions(tmp_path, host="0.0.0.0"), token=None, stop=threading.Event())
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="give another --directory"):
        run_relay(service.url, RelayOptions(tmp_path / "file"), token=None, stop=threading.Event())


def test_waiting_for_a_version_that_comes_late_does_not_make_a_relay_slow(tmp_path: Path) -> None:
    """It would send the next fetch over the distant link, as a relay has each version a little later."""
    here, there = FileStore(tmp_path / "here", "actor"), FileStore(tmp_path / "there", "actor")
    for store in (here, there):
        store.publish(0, model(0))
    with serving_weights(tmp_path / "here") as near, serving_weights(tmp_path / "there") as far:
        urls = (f"{far}/weights/actor", f"{near}/weights/actor")
        client = WeightClient(wait_s=20.0)
        client._chooser._probe = lambda base: 0.0 if base == near else 0.3  # as over a distant link
        client.fetch(WeightVersion("actor", 0, urls))
        late = threading.Timer(1.0, here.publish, (1, model(1)))
        late.start()
        there.publish(1, model(1))
        client.fetch(WeightVersion("actor", 1, urls))
        late.join()
        assert client._chooser.order(urls)[0] == f"{near}/weights/actor"
        client.close()


def chain(root: Path, versions: range, amount: float) -> FileStore:
    """Each version as the changes since the one before; `amount` tells one past from another."""
    store, base = FileStore(root, "actor"), None
    for version in versions:
        tensors = other_past(version, amount)
        content = store.publish(version, tensors, base=base)
        base = Base(version, tensors, {entry.name: entry.xxh3 for entry in content.tensors})
    return store


def other_past(version: int, amount: float) -> dict[str, torch.Tensor]:
    weights = torch.arange(40_000.0)
    weights[: version + 1] += amount
    return {"w": weights}


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    stop, client = threading.Event(), WeightClient(give_up_s=0.5)
    started = Follower(FileStore(tmp_path / "relay", "actor"), client, stop)
    yield started
    stop.set()
    client.close()
    started.join(60)


@pytest.mark.parametrize(("newest", "trainer"), [(4, "after"), (5, "after"), (6, "after"), (4, "before")])
def test_a_relay_drops_what_is_of_another_past(tmp_path: Path, follower: Follower, newest: int, trainer: str) -> None:
    """The trainer's directory is lost, and it goes on from its checkpoint of version 3; under the name that it had, if
    its ranks are given one."""
    copied, reader = follower.store, WeightClient()
    chain(tmp_path / "a", range(6), 1.0)
    chain(tmp_path / "b", range(3, newest + 1), 2.0)
    with serving_weights(tmp_path / "a") as url:
        follower.announce(WeightVersion("actor", 5, (f"{url}/weights/actor",)), "before")
        wait_until(lambda: follower.version == 5, "the first past", 20)
    with serving_weights(tmp_path / "relay") as relay:
        near = (f"{relay}/weights/actor",)
        reader.fetch(WeightVersion("actor", 5, near))
        expected = other_past(newest, 2.0)
        with serving_weights(tmp_path / "b") as url:
            follower.announce(WeightVersion("actor", newest, (f"{url}/weights/actor",)), trainer)
            wait_until(lambda: follower.version == newest and same_bits(copied.fetch(newest), expected), "it", 20)
        for version in copied.versions():
            assert same_bits(copied.fetch(version), other_past(version, 2.0 if version >= 3 else 1.0)), version
        held = reader.fetch(WeightVersion("actor", newest, near))
        assert same_bits(held.tensors, expected), "the relay's server does not remember what was there"
    reader.close()


def test_of_another_relay_only_what_differs_counts(tmp_path: Path) -> None:
    """It came later and has less, or left out what we have; what it does not have is not wrong."""
    ours, theirs = chain(tmp_path / "a", range(5), 1.0), FileStore(tmp_path / "b", "actor")
    for version in (2, 6):  # a gap, and nothing before 2
        theirs.publish(version, other_past(version, 1.0))
    compared = list[None]()
    copy_version(theirs, ours, 6, on_compared=lambda: compared.append(None))
    assert ours.versions() == [0, 1, 2, 3, 4, 6] and len(compared) == 1
    assert same_bits(ours.fetch(6), other_past(6, 1.0)) and same_bits(ours.fetch(4), other_past(4, 1.0))


def test_nothing_new_rests_on_what_was_not_compared(tmp_path: Path) -> None:
    """Version 3 of ours is of another past, which the other store cannot show: its 4 is changes since another 3."""
    ours, theirs = chain(tmp_path / "a", range(4), 1.0), chain(tmp_path / "b", range(3, 5), 2.0)
    theirs.publish(5, other_past(5, 2.0))  # whole
    shutil.rmtree(theirs.directory / "3")
    with pytest.raises(WeightError, match="cannot be reached"):
        copy_version(theirs, ours, 4, on_compared=lambda: None)
    copy_version(theirs, ours, 5, on_compared=lambda: None)
    assert ours.versions() == [0, 1, 2, 3, 5]
    assert same_bits(ours.fetch(5), other_past(5, 2.0))


def test_an_earlier_version_rests_on_what_came_before_it(tmp_path: Path) -> None:
    ours, theirs = chain(tmp_path / "a", range(3), 1.0), chain(tmp_path / "b", range(6), 1.0)
    ours.publish(5, other_past(5, 1.0))
    for version in (0, 1):  # its 3 comes as changes since 2 only
        shutil.rmtree(theirs.directory / str(version))
    copy_version(theirs, ours, 3, on_compared=lambda: None)
    assert ours.versions() == [0, 1, 2, 3, 5]
    assert same_bits(ours.fetch(3), other_past(3, 1.0))


def test_what_comes_after_the_announced_version_is_taken_again(tmp_path: Path) -> None:
    ours, theirs = chain(tmp_path / "a", range(6), 1.0), chain(tmp_path / "b", range(4), 1.0)
    copy_version(theirs, ours, 3, on_compared=lambda: None)
    assert ours.versions() == [0, 1, 2, 3]


def test_a_relay_of_another_past_is_not_told_of(service: DataflowThread) -> None:
    """A node could not tell: its manifests and tensors agree, they are only those of another trainer."""
    client = DataflowClient(service.url)
    run_id = client.run().run_id

    def resume(trainer: str) -> None:
        client.resume("actor", m.Resume(trainer_id=trainer, version=0, urls=("http://a/actor",), run_id=run_id))

    def beat(relay_id: str, holds: dict[str, str]) -> m.RelayReply:
        return client.relay(relay_id, m.Relay(run_id=run_id, url=f"http://{relay_id}:80", holds=holds))

    resume("first")
    assert beat("r1", {}).trainers == {"actor": "first"}
    beat("r1", {"actor": "first"})
    beat("r2", {})  # it has nothing yet, and will fetch what there is
    assert stores(service).urls == ("http://a/actor", "http://r1:80/weights/actor", "http://r2:80/weights/actor")
    resume("second")
    assert stores(service).urls == ("http://a/actor", "http://r2:80/weights/actor")
    beat("r1", {"actor": "second"})
    beat("r2", {"actor": "first"})
    assert beat("r2", {"actor": "first"}).versions["actor"].urls == ("http://a/actor", "http://r1:80/weights/actor")
    assert stores(service).urls == ("http://a/actor", "http://r1:80/weights/actor")
    client.close()


def test_a_relay_says_whose_versions_it_has(tmp_path: Path, follower: Follower) -> None:
    assert follower.trainer is None
    chain(tmp_path / "a", range(2), 1.0)
    with serving_weights(tmp_path / "a") as url:
        urls = (f"{url}/weights/actor",)
        follower.announce(WeightVersion("actor", 1, urls), "first")
        wait_until(lambda: follower.version == 1, "the version", 20)
        assert follower.trainer == "first"
        follower.announce(WeightVersion("actor", 2, urls), "second")  # which it has to publish still
        wait_until(lambda: follower.num_failures > 0, "a try", 20)
        assert follower.trainer == "first", "not compared yet"
        chain(tmp_path / "a", range(3), 1.0)
        wait_until(lambda: follower.trainer == "second", "the comparison", 20)
    again = Follower(FileStore(tmp_path / "relay", "actor"), WeightClient(), threading.Event())
    assert again.trainer == "", "what another process has left is compared first"
    again._stop.set()
    again.join(60)


def test_what_is_compared_with_was_announced(tmp_path: Path) -> None:
    """An object store that gave the version before may still be as the trainer before left it."""
    store, client = chain(tmp_path / "a", range(2), 1.0), WeightClient(give_up_s=0.1)
    client._served["actor"] = "memory://bucket/actor?objects=1"
    with serving_weights(tmp_path / "a") as url, pytest.raises(WeightError, match="may be of the trainer before"):
        client.copy(WeightVersion("actor", 5, (f"{url}/weights/actor",)), store, lambda: None)
    client.close()


def test_a_relay_keeps_what_the_trainer_still_has(tmp_path: Path, follower: Follower) -> None:
    """It only moved to another address."""
    copied = follower.store
    chain(tmp_path / "a", range(3), 1.0)
    with serving_weights(tmp_path / "a") as url:
        follower.announce(WeightVersion("actor", 2, (f"{url}/weights/actor",)), "before")
        wait_until(lambda: follower.version == 2, "the version", 20)
    before = {version: (copied.directory / str(version)).stat().st_ino for version in copied.versions()}
    chain(tmp_path / "a", range(4), 1.0)
    with serving_weights(tmp_path / "a") as url:
        follower.announce(WeightVersion("actor", 3, (f"{url}/weights/actor",)), "after")
        wait_until(lambda: follower.version == 3, "the next one", 20)
    assert {version: (copied.directory / str(version)).stat().st_ino for version in before} == before


def test_further_parts_of_a_version_come_before_the_manifest_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = chain(tmp_path / "a", range(2), 1.0), FileStore(tmp_path / "b", "actor")
    theirs.publish(1, other_past(1, 1.0))
    whole = theirs.manifest(1)
    assert ours.infos()[1].full_nbytes == -1
    moved, rename = list[str](), os.rename

    def note(source: Path, target: Path) -> None:
        moved.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "rename", note)
    ours.adopt(whole, lambda entry: theirs.read(1, entry))
    assert moved == ["model.safetensors", "manifest.json"]


def test_a_version_of_other_content_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    ours, theirs = chain(tmp_path / "a", range(4), 1.0), chain(tmp_path / "b", range(2, 3), 2.0)
    ours.adopt(theirs.manifest(2), lambda entry: theirs.read(2, entry))
    assert ours.versions() == [0, 1, 2]
    assert same_bits(ours.fetch(2), other_past(2, 2.0))


def test_a_relay_whose_thread_dies_ends_with_what_it_died_of(
    service: DataflowThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: WeightClient, *args: Any, **options: Any) -> str:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(WeightClient, "copy", broken)
    client = DataflowClient(service.url)
    client.resume("actor", m.Resume(trainer_id="t", version=0, urls=("http://a/actor",), run_id=client.run().run_id))
    client.close()
    with pytest.raises(WeightError, match="actor stopped with KeyError: 'a fault of ours'"):
        run_relay(service.url, RelayOptions(tmp_path), token=None, stop=threading.Event())


def test_a_full_disk_of_a_relay_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "_PAUSE_S", 0.01)
    faults: list[Exception] = [OSError(28, "No space left on device"), WeightError("a", 1, "b", "c")]
    came, stop, client = threading.Event(), threading.Event(), WeightClient()

    def copy(wanted: WeightVersion, store: FileStore, *options: Any) -> str:
        if faults:
            raise faults.pop()
        store.publish(0, model(0))
        came.set()
        return ""

    monkeypatch.setattr(client, "copy", copy)
    follower = Follower(FileStore(tmp_path, "actor"), client, stop)
    follower.announce(WeightVersion("actor", 0, ("http://a/actor",)), "t")
    assert came.wait(60.0) and follower.num_failures == 2
    stop.set()
    follower.join(60.0)
    follower.check()
    client.close()
