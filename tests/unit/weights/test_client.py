"""A client that fetches versions from stores that are here, elsewhere, damaged, or no stores."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from astraflow.errors import WeightError
from astraflow.testing.services import serving_weights
from astraflow.testing.weights import make_tensors, same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.weights.files.build import Base
from astraflow.weights.manifest import MANIFEST
from astraflow.weights.plan import VersionInfo
from astraflow.weights.store import FileStore
from faulty_store import Faults, faulty


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
