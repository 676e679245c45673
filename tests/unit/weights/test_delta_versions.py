"""Versions that travel as deltas: published, kept, fetched from a directory and over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.errors import WeightError
from astraflow.testing.services import serving_weights
from astraflow.testing.weights import same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch.copy import add_tensors, copy_version
from astraflow.weights.fetch.http import HttpReader
from astraflow.weights.fetch.route import Counts, Held, bring
from astraflow.weights.files.build import Base
from astraflow.weights.manifest import MANIFEST
from astraflow.weights.store import FileStore
from astraflow.wire.client import HttpClient

Tensors = dict[str, torch.Tensor]


def model(version: int) -> Tensors:
    """A few elements differ from version to version; "grown" is new in version 3 and gone in version 5."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed": torch.randn(400, 64, generator=generator).to(torch.bfloat16),
        "norm": torch.ones(64),
    }
    for step in range(1, version + 1):
        chosen = torch.randint(400 * 64, (200,), generator=torch.Generator().manual_seed(step))
        tensors["embed"].view(-1).view(torch.int16)[chosen] += 1
        tensors["norm"][step % 64] += 1e-3
    if 3 <= version < 5:
        tensors["grown"] = torch.full((5,), float(version))
    return tensors


def publish(store: FileStore, versions: Iterator[int] | range, files: tuple[Path, ...] = ()) -> None:
    base: Base | None = None
    for version in versions:
        tensors = model(version)
        store.publish(version, tensors, files, base=base)
        base = Base(version, tensors, {e.name: e.xxh3 for e in store.manifest(version).tensors})


def kinds(store: FileStore) -> dict[int, str]:
    return {
        v: ("f" if info.full_nbytes >= 0 else "") + ("d" if info.base >= 0 else "") for v, info in store.infos().items()
    }


@pytest.fixture
def chain(store: FileStore) -> FileStore:
    publish(store, range(7))
    return store


def test_versions_after_the_first_travel_as_small_deltas_and_come_back_bit_for_bit(chain: FileStore) -> None:
    assert kinds(chain) == {0: "f", 1: "d", 2: "d", 3: "d", 4: "d", 5: "d", 6: "d"}
    infos = chain.infos()
    assert all(infos[v].delta_nbytes < infos[0].full_nbytes / 20 for v in range(1, 7))
    for version in (6, 0, 3):
        assert same_bits(chain.fetch(version), model(version))


def test_a_reader_takes_the_changes_since_what_it_holds(chain: FileStore) -> None:
    held = bring(chain, None, 1)
    counts = Counts()
    assert same_bits(bring(chain, held, 2, counts=counts).tensors, model(2))
    assert (counts.deltas, counts.nbytes) == (1, chain.infos()[2].delta_nbytes)
    counts = Counts()
    held = bring(chain, held, 6, counts=counts)
    assert same_bits(held.tensors, model(6))
    assert (held.version, counts.deltas, counts.refused_deltas) == (6, 1, 0)  # one, merged of four
    assert counts.nbytes < sum(chain.infos()[v].delta_nbytes for v in range(3, 7))


def test_a_full_version_comes_every_so_often_and_before_a_chain_costs_more(tmp_path: Path) -> None:
    often = FileStore(tmp_path / "often", "actor", full_every=3)
    publish(often, range(8))
    assert kinds(often) == {0: "f", 1: "d", 2: "d", 3: "fd", 4: "d", 5: "d", 6: "fd", 7: "d"}
    dense = FileStore(tmp_path / "dense", "actor")
    before = {"w": torch.randn(5000)}
    dense.publish(0, before)
    checksums = {e.name: e.xxh3 for e in dense.manifest(0).tensors}
    dense.publish(1, {"w": torch.randn(5000)}, base=Base(0, before, checksums))
    assert kinds(dense) == {0: "f", 1: "f"}
    assert sorted(p.name for p in (dense.directory / "1").iterdir()) == [MANIFEST, "model.safetensors"]


def test_what_a_kept_version_rests_on_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=2, full_every=4)
    publish(store, range(6))
    assert store.versions() == [4, 5]
    publish(store, range(6, 8))
    assert store.versions() == [6, 7]  # 6 came without a base: whole


def test_a_base_that_is_not_what_the_store_has_makes_no_delta(store: FileStore) -> None:
    store.publish(0, model(0))
    store.publish(1, model(1), base=Base(0, model(0), {"embed": "00"}))
    assert kinds(store) == {0: "f", 1: "f"}
    store.publish(3, model(3), base=Base(0, model(0), {e.name: e.xxh3 for e in store.manifest(0).tensors}))
    assert kinds(store)[3] == "f"  # version 1 lies between


def test_over_http_one_delta_is_one_request_for_it(chain: FileStore, tmp_path: Path) -> None:
    client = WeightClient()
    with serving_weights(chain.directory.parent) as url:
        urls = (f"{url}/weights/actor",)
        held = client.fetch(WeightVersion("actor", 0, urls))
        for version in (1, 4, 6):
            held = client.fetch(WeightVersion("actor", version, urls), held)
            assert same_bits(held.tensors, model(version))
        assert client.counts["deltas"] == 3
        late = client.fetch(WeightVersion("actor", 5, urls))
        assert same_bits(late.tensors, model(5))
    client.close()


def test_a_server_without_a_chain_says_so(chain: FileStore) -> None:
    with serving_weights(chain.directory.parent) as url:
        client = WeightClient(give_up_s=0.5)
        reader = client._reader(f"{url}/weights/actor", WeightVersion("actor", 6, ()))
        assert reader is not None
        assert reader.merged(6, 2) is not None
        (chain.directory / "4" / MANIFEST).unlink()
        assert reader.merged(6, 1) is None
        client.close()


def test_a_delta_that_is_torn_on_its_way_is_read_again(chain: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held, counts, read, torn = bring(chain, None, 4), Counts(), chain.read, [0]

    def read_torn(version: int, entry: Any) -> Any:
        buffer = read(version, entry)
        if torn:
            buffer[len(buffer) // 2] ^= 1
            torn.pop()
        return buffer

    monkeypatch.setattr(chain, "read", read_torn)
    assert same_bits(bring(chain, held, 5, counts=counts).tensors, model(5))
    assert (counts.torn_parts, counts.deltas, counts.refused_deltas) == (1, 1, 0)


@pytest.mark.parametrize("wrong", ["bytes", "content", "base"])
def test_a_delta_that_leads_elsewhere_is_refused_counted_and_replaced_by_a_full_fetch(
    chain: FileStore, wrong: str
) -> None:
    held = bring(chain, None, 4)
    counts = Counts()
    if wrong == "bytes":
        part = next((chain.directory / "5").glob("delta*"))
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
        with pytest.raises(WeightError):  # the only way to 5 is through the damaged part
            bring(chain, held, 5, counts=counts)
        assert same_bits(held.tensors, model(4))
        assert held.version == 4
        return
    if wrong == "content":
        held.tensors["embed"].view(-1)[7] += 1
    else:
        held = Held(held.manifest, model(3))
    assert same_bits(bring(chain, held, 5, counts=counts).tensors, model(5))
    assert counts.refused_deltas == 1


def test_a_held_version_of_another_past_is_replaced_in_full_and_counted(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, counts = FileStore(tmp_path / "other", "actor", durable=False), Counts()
    store.publish(5, model(5))
    other.publish(5, model(6))
    held = bring(store, None, 5)
    assert same_bits(bring(other, held, 5, counts=counts).tensors, model(6))
    assert counts.refused_deltas == 1 and "of another past" in caplog.text
    assert same_bits(held.tensors, model(5)), "it is as before"
    assert bring(store, held, 5, counts=counts) is held and counts.refused_deltas == 1


def test_a_version_that_is_announced_before_it_is_there_is_waited_for(store: FileStore) -> None:
    store.publish(0, model(0))
    later = threading.Timer(0.3, lambda: store.publish(1, model(1)))
    later.start()
    client = WeightClient(wait_s=10.0)
    with serving_weights(store.directory.parent) as url:
        over_http = client.fetch(WeightVersion("actor", 1, (f"{url}/weights/actor",)))
        later.join()
        later = threading.Timer(0.3, lambda: store.publish(2, model(2)))
        later.start()
        here = client.fetch(WeightVersion("actor", 2, (store.url,)))
        later.join()
    assert same_bits(over_http.tensors, model(1))
    assert same_bits(here.tensors, model(2))
    client.close()


def test_merged_deltas_are_made_once(chain: FileStore) -> None:
    first = chain.merged(6, 2)
    assert first == chain.merged(6, 2)
    assert json.loads((chain.directory / "6" / "merged-2.json").read_text())["base"] == 2
    assert len(list((chain.directory / "6").glob("merged-2-*.bin"))) == 1


def test_nothing_waits_for_a_version_that_is_gone(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor", keep=1)
    publish(store, iter([0]))
    store.publish(1, model(1))
    with pytest.raises(WeightError, match="is not in"):
        store.manifest(0, wait_s=60.0)


def test_a_version_of_another_store_is_adopted_as_it_travels(chain: FileStore, tmp_path: Path) -> None:
    relay = FileStore(tmp_path / "relay", "actor")
    for version in (0, 1, 2):
        relay.adopt(chain.manifest(version), partial(chain.read, version))
    assert kinds(relay) == {0: "f", 1: "d", 2: "d"}
    assert same_bits(relay.fetch(2), model(2))
    full = FileStore(tmp_path / "full", "actor")
    full.publish(2, model(2))
    relay.adopt(full.manifest(2), partial(full.read, 2))  # later, what it lacked
    assert kinds(relay) == {0: "f", 1: "d", 2: "fd"}
    assert same_bits(relay.fetch(2), model(2))


def test_what_is_adopted_is_verified(chain: FileStore, tmp_path: Path) -> None:
    relay = FileStore(tmp_path / "relay", "actor")
    with pytest.raises(WeightError, match="checksum"):
        relay.adopt(chain.manifest(0), lambda entry: bytes(entry.nbytes))
    assert relay.versions() == []


def test_a_relay_copies_what_it_lacks_and_serves_it(chain: FileStore, tmp_path: Path) -> None:
    relay = FileStore(tmp_path / "relay", "actor")
    with serving_weights(chain.directory.parent) as url:
        reader = HttpReader(HttpClient(url, None), "/weights/actor", "actor")
        copy_version(reader, relay, 1)
        copy_version(reader, relay, 2)
        copy_version(reader, relay, 6)
    assert kinds(relay) == {0: "f"} | dict.fromkeys(range(1, 7), "d")
    for version in range(6):  # whatever a reader holds, there is a way from it
        counts = Counts()
        held = bring(relay, bring(relay, None, version), 6, counts=counts)
        assert same_bits(held.tensors, model(6)) and counts.deltas == 1


def test_a_relay_copies_each_config_file_once(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    publish(store, range(3), (tmp_path / "config.json",))
    relay, asked = FileStore(tmp_path / "relay", "actor"), list[str]()

    class Counting(FileStore):
        def read(self, version: int, entry: Any) -> Any:
            asked.append(entry.name)
            return super().read(version, entry)

    for version in range(3):
        copy_version(Counting(store.directory.parent, "actor"), relay, version)
    assert asked.count("config.json") == 1 and len(asked) > 3
    assert relay.files(2)["config.json"].read_text() == "{}"


def test_a_relay_gets_the_tensors_of_a_version_later(tmp_path: Path) -> None:
    trainer, relay = (
        FileStore(tmp_path / "trainer", "actor", full_every=2),
        FileStore(tmp_path / "relay", "actor", keep=1),
    )
    publish(trainer, range(3))
    for version in range(3):
        copy_version(trainer, relay, version)
    assert kinds(relay) == {0: "f", 1: "d", 2: "d"}
    add_tensors(trainer, relay, 2)
    assert kinds(relay) == {2: "fd"}
    assert same_bits(relay.fetch(2), model(2))
