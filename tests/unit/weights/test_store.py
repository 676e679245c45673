from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from astraflow.errors import WeightError
from astraflow.testing.weights import make_tensors, same_bits
from astraflow.weights.files import layout
from astraflow.weights.files.leases import reading
from astraflow.weights.manifest import DTYPES, MANIFEST
from astraflow.weights.store import FileStore

PUBLISH = """
import sys, torch
from pathlib import Path
from astraflow.weights.files import build as module
from astraflow.weights.store import FileStore

store = FileStore(Path(sys.argv[1]), "actor")
where = sys.argv[2]
real = getattr(module, where)

def stuck(*args, **kwargs):
    if where == "write_part":
        real(*args, **kwargs)
    print("here", flush=True)
    sys.stdin.read()

setattr(module, where, stuck)
store.publish(1, {"w": torch.ones(1000)})
"""


def test_published_tensors_come_back_bit_for_bit(store: FileStore) -> None:
    tensors = make_tensors()
    store.publish(0, tensors)
    assert same_bits(store.fetch(0), tensors)
    assert list(store.fetch(0)) == list(tensors)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    code=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 5), max_size=3),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_dtype_and_shape_survives(
    tmp_path_factory: pytest.TempPathFactory, code: str, shape: list[int], transposed: bool, seed: int
) -> None:
    name, width = DTYPES[code]
    dtype: torch.dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if code == "BOOL" else 256
    raw = torch.randint(0, high, (*shape, width), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).reshape(shape)
    if transposed and len(shape) > 1:
        tensor = tensor.transpose(0, 1)
    store = FileStore(tmp_path_factory.mktemp("weights"), "actor", durable=False)
    store.publish(0, {"x": tensor, "y": torch.zeros(3)})
    assert same_bits(store.fetch(0), {"x": tensor, "y": torch.zeros(3)})


def test_many_parts_are_one_hugging_face_directory(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PART_BYTES", 1500)
    tensors = make_tensors()
    store.publish(0, tensors)
    directory = store.directory / "0"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    loaded = {name: tensor for file in names for name, tensor in load_file(directory / file).items()}
    assert same_bits({name: loaded[name] for name in tensors}, tensors)
    assert same_bits(store.fetch(0), tensors)


def test_fetched_tensors_are_writable_and_private(store: FileStore) -> None:
    store.publish(0, make_tensors())
    store.fetch(0)["layer.0.weight"].zero_()
    assert same_bits(store.fetch(0), make_tensors())


def test_nothing_is_published_at_first(store: FileStore) -> None:
    assert store.latest().version == -1
    assert store.latest().urls == ()
    assert store.versions() == []
    with pytest.raises(WeightError, match="actor version=3 is not in"):
        store.fetch(3)


def test_the_newest_version_is_the_highest_number(store: FileStore) -> None:
    for version in (9, 10, 2):
        store.publish(version, make_tensors(version))
    assert store.versions() == [2, 9, 10]
    assert store.latest().version == 10
    assert store.latest().urls == (store.url,)
    assert store.manifest(10).parent == 9
    assert store.manifest(2).parent == -1


def test_publishing_the_same_again_changes_nothing(store: FileStore) -> None:
    store.publish(1, make_tensors())
    before = (store.directory / "1" / MANIFEST).stat().st_mtime_ns
    store.publish(1, make_tensors())
    store.publish(1, make_tensors(), keep_existing=True)
    assert (store.directory / "1" / MANIFEST).stat().st_mtime_ns == before
    assert store.num_kept_existing == 0


def test_other_content_under_a_version_is_refused_or_counted(store: FileStore) -> None:
    store.publish(1, make_tensors(0))
    with pytest.raises(WeightError, match="already exists with other content"):
        store.publish(1, make_tensors(1))
    store.publish(1, make_tensors(1), keep_existing=True)
    assert store.num_kept_existing == 1
    assert same_bits(store.fetch(1), make_tensors(0))


def test_one_changed_bit_is_other_content(store: FileStore) -> None:
    tensors = make_tensors()
    store.publish(1, tensors)
    tensors["embed.weight"].view(torch.int16)[3, 3] ^= 1
    with pytest.raises(WeightError, match="other content"):
        store.publish(1, tensors)


@pytest.mark.parametrize("version", [-1, -5])
def test_negative_versions_are_refused(store: FileStore, version: int) -> None:
    with pytest.raises(WeightError, match="must be >= 0"):
        store.publish(version, make_tensors())


def test_a_dtype_without_a_place_is_refused(store: FileStore) -> None:
    with pytest.raises(WeightError, match="cannot be published"):
        store.publish(0, {"x": torch.zeros(2, dtype=torch.complex64)})
    assert store.versions() == []


@pytest.mark.parametrize("policy", ["", "../actor", "a/b", "1a", "a..b"])
def test_policy_names_that_lead_elsewhere_are_refused(tmp_path: Path, policy: str) -> None:
    with pytest.raises(WeightError, match="is not a policy name"):
        FileStore(tmp_path, policy)


def test_files_travel_with_the_version_and_are_stored_once(store: FileStore, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"a": 1}')
    store.publish(0, make_tensors(0), [config])
    store.publish(1, make_tensors(1), [config])
    config.write_text('{"a": 2}')
    store.publish(2, make_tensors(2), [config])
    assert store.files(1)["config.json"].read_text() == '{"a": 1}'
    assert store.files(2)["config.json"].read_text() == '{"a": 2}'
    inodes = [store.files(version)["config.json"].stat().st_ino for version in (0, 1, 2)]
    assert inodes[0] == inodes[1] != inodes[2]


def test_files_that_cannot_lie_beside_weights_are_refused(store: FileStore, tmp_path: Path) -> None:
    for name in (MANIFEST, "other.safetensors", ".hidden"):
        (tmp_path / name).write_text("x")
        with pytest.raises(WeightError, match="cannot lie beside weights"):
            store.publish(0, make_tensors(), [tmp_path / name])
    with pytest.raises(WeightError, match="cannot be read"):
        store.publish(0, make_tensors(), [tmp_path / "absent.json"])
    assert store.versions() == []


def test_a_flipped_byte_is_found(store: FileStore) -> None:
    store.publish(0, make_tensors())
    part = store.directory / "0" / "model.safetensors"
    content = bytearray(part.read_bytes())
    content[-7] ^= 0x40
    part.write_bytes(content)
    with pytest.raises(WeightError, match=r"checksum of model\.safetensors:layer\.0\.bias"):
        store.fetch(0)


@pytest.mark.parametrize("change", [-1, -500, 3])
def test_a_part_of_another_length_is_found(store: FileStore, change: int) -> None:
    store.publish(0, make_tensors())
    part = store.directory / "0" / "model.safetensors"
    os.truncate(part, part.stat().st_size + change)
    with pytest.raises(WeightError, match="must have"):
        store.fetch(0)


def test_a_torn_version_is_replaced_by_the_next_publish(store: FileStore) -> None:
    store.publish(0, make_tensors())
    os.truncate(store.directory / "0" / "model.safetensors", 10)
    store.publish(0, make_tensors())
    assert same_bits(store.fetch(0), make_tensors())


@pytest.mark.parametrize("where", ["write_part", "sync_path"])
def test_a_publisher_killed_half_way_leaves_what_was_there(tmp_path: Path, where: str) -> None:
    store = FileStore(tmp_path, "actor")
    store.publish(0, make_tensors())
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISH, str(tmp_path), where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        assert store.versions() == [0]  # nothing of version 1 is visible
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert store.versions() == [0]
    assert same_bits(store.fetch(0), make_tensors())
    left = [name for name in os.listdir(store.directory) if name.startswith(".tmp-")]
    assert len(left) == 1
    FileStore(tmp_path, "actor").publish(1, make_tensors(1))
    assert store.versions() == [0, 1]
    assert not [name for name in os.listdir(store.directory) if name.startswith(".tmp-")]


def test_only_own_leftovers_are_swept(tmp_path: Path) -> None:
    other = tmp_path / "critic" / ".tmp-1-abc"
    other.mkdir(parents=True)
    store = FileStore(tmp_path, "actor")
    store.publish(0, make_tensors())
    (store.directory / "notes").mkdir()
    (store.directory / ".tmp-7-abc").mkdir()
    store.publish(1, make_tensors(1))
    assert other.exists()
    assert (store.directory / "notes").exists()
    assert not (store.directory / ".tmp-7-abc").exists()


def test_a_full_disk_is_said_and_leaves_what_was_there(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(0, make_tensors())

    def full(fd: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(layout.os, "write", full)
    with pytest.raises(WeightError, match="No space left on device"):
        store.publish(1, make_tensors(1))
    monkeypatch.undo()
    assert store.versions() == [0]
    assert not [name for name in os.listdir(store.directory) if name.startswith(".tmp-")]
    assert same_bits(store.fetch(0), make_tensors())


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(WeightError, match="weights directory"):
        FileStore(tmp_path / "weights", "actor").publish(0, make_tensors())


def test_publishers_of_one_policy_take_turns(tmp_path: Path) -> None:
    stores = [FileStore(tmp_path, "actor", keep=3) for _ in range(4)]
    failures: list[BaseException] = []

    def publish(store: FileStore) -> None:
        try:
            for version in range(6):
                store.publish(version, make_tensors(version))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert same_bits(stores[0].fetch(5), make_tensors(5))


def test_a_reader_sees_whole_versions_only(tmp_path: Path) -> None:
    store, reader = FileStore(tmp_path, "actor", keep=2, durable=False), FileStore(tmp_path, "actor")
    store.publish(0, make_tensors(0))
    done = threading.Event()
    seen: list[int] = []
    failures: list[str] = []

    def read() -> None:
        while not done.is_set():
            version = reader.latest().version
            with reading(reader.directory, version):
                if version not in reader.versions():
                    continue  # retired before the lease was taken
                tensors = reader.fetch(version)  # from here on it must be there
            if not same_bits(tensors, make_tensors(version)):
                failures.append(f"version {version} is not what was published")
            seen.append(version)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 60
    version = 0
    while (len(set(seen)) < 10 and time.monotonic() < deadline) and thread.is_alive():
        version += 1
        store.publish(version, make_tensors(version))
    done.set()
    thread.join()
    assert failures == []
    assert len(set(seen)) >= 10


def test_torch_is_not_needed_to_look_at_a_store(tmp_path: Path) -> None:
    code = "import sys\nfrom astraflow.weights import app, store, client, server\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "False"
