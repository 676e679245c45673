from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3

from astraflow.errors import LaunchError, Unauthorized
from astraflow.testing.services import serving_weights
from astraflow.testing.weights import make_tensors, same_bits
from astraflow.types import WeightVersion
from astraflow.weights import app as app_module
from astraflow.weights.client import WeightClient
from astraflow.weights.files.leases import leased_versions
from astraflow.weights.manifest import MANIFEST, Delta
from astraflow.weights.server import ServerProcess, start_server
from astraflow.weights.store import FileStore
from published import publish

TOKEN = "correct-horse"


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def pool() -> Iterator[urllib3.PoolManager]:
    with urllib3.PoolManager(retries=False, timeout=60) as manager:
        yield manager


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FileStore, str]]:
    store = FileStore(tmp_path, "actor")
    store.publish(0, make_tensors(0))
    store.publish(2, make_tensors(2))
    with serving_weights(tmp_path) as url:
        yield store, f"{url}/weights/actor"


def test_versions_are_listed(served: tuple[FileStore, str], pool: urllib3.PoolManager) -> None:
    _, url = served
    listing = pool.request("GET", url).json()
    assert (listing["policy"], listing["latest"]) == ("actor", 2)
    assert [(info["version"], info["full_nbytes"] > 0, info["base"]) for info in listing["infos"]] == [
        (0, True, -1), (2, True, -1)
    ]  # fmt: skip
    other = url.replace("actor", "critic")
    assert pool.request("GET", other).json() == {"policy": "critic", "latest": -1, "infos": []}


def test_the_manifest_and_parts_are_the_files(served: tuple[FileStore, str], pool: urllib3.PoolManager) -> None:
    store, url = served
    for name in (MANIFEST, "model.safetensors"):
        assert pool.request("GET", f"{url}/2/{name}").data == (store.directory / "2" / name).read_bytes()


@pytest.mark.parametrize(
    ("header", "status", "span"),
    [
        ("bytes=10-", 206, slice(10, None)),
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=5-99999999", 206, slice(5, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=1-2,4-5", 200, slice(None)),
        ("lines=1-2", 200, slice(None)),
        ("bytes=-", 200, slice(None)),
    ],
)
def test_a_range_is_honoured(
    served: tuple[FileStore, str], pool: urllib3.PoolManager, header: str, status: int, span: slice
) -> None:
    store, url = served
    content = (store.directory / "0" / "model.safetensors").read_bytes()
    reply = pool.request("GET", f"{url}/0/model.safetensors", headers={"range": header})
    assert reply.status == status
    assert reply.data == content[span]
    if status == 206:
        start, stop, _ = span.indices(len(content))
        assert reply.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(content)}"


@pytest.mark.parametrize(
    "header",
    ["bytes=99999999-", "bytes=5-4", "bytes=-0", f"bytes={'9' * 5000}-", f"bytes=0-{'9' * 5000}", f"bytes=-{'9' * 19}"],
    ids=len,
)
def test_a_range_outside_the_part_is_refused(
    served: tuple[FileStore, str], pool: urllib3.PoolManager, header: str
) -> None:
    reply = pool.request("GET", f"{served[1]}/0/model.safetensors", headers={"range": header})
    assert reply.status == 416
    assert "must lie within" in reply.json()["error"]


@pytest.mark.parametrize(
    "path", ["1/manifest.json", "0/absent", "x/manifest.json", "-1/manifest.json", f"{'9' * 5000}/a"], ids=len
)
def test_what_is_not_there_is_not_found(served: tuple[FileStore, str], pool: urllib3.PoolManager, path: str) -> None:
    assert pool.request("GET", f"{served[1]}/{path}").status == 404


def test_paths_that_lead_out_are_refused(served: tuple[FileStore, str]) -> None:
    store, url = served
    (store.directory.parent / "secret.txt").write_text("secret")
    (store.directory / "0" / "link").symlink_to(store.directory.parent / "secret.txt")
    address = urlsplit(url)
    paths = (
        "/weights/actor/0/../../secret.txt",
        "/weights/actor/0/..%2f..%2fsecret.txt",
        "/weights/../0/secret.txt",
        "/weights/%2e%2e/0/secret.txt",
        "/weights/actor/0/%2e%2e%2f%2e%2e%2fsecret.txt",
        "/weights/actor/0/link",
        "/weights/actor/0/.lock",
        "/weights/actor/0//etc/passwd",
    )
    for path in paths:
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            reply = b"".join(iter(lambda: raw.recv(65536), b""))
        assert reply.split(b" ", 2)[1] == b"404", path
        assert b"\r\n\r\nsecret" not in reply


def test_a_pickle_is_refused(served: tuple[FileStore, str], pool: urllib3.PoolManager, tmp_path: Path) -> None:
    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
            return os.mkdir, (str(witness),)

    body = pickle.dumps(Evil())
    for path in ("", "/0/manifest.json", "/3/model.safetensors"):
        for method in ("POST", "PUT", "DELETE"):
            assert pool.request(method, served[1] + path, body=body).status in (404, 405, 426)
    assert not witness.exists()
    assert served[0].versions() == [0, 2]


def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor")
    store.publish(0, make_tensors())
    with serving_weights(tmp_path, TOKEN) as url:
        wanted = WeightVersion("actor", 0, (f"{url}/weights/actor",))
        for wrong in (None, "wrong", TOKEN + "x"):
            client = WeightClient(wrong)
            with pytest.raises(Unauthorized, match="ASTRAFLOW_TOKEN"):
                client.fetch(wanted)
            client.close()
        client = WeightClient(TOKEN)
        assert same_bits(client.fetch(wanted).tensors, make_tensors())
        client.close()


def test_a_reader_that_stalls_delays_nobody(tmp_path: Path) -> None:
    import torch

    store = FileStore(tmp_path, "actor", keep=1, durable=False)
    big = {"w": torch.zeros(24 << 20, dtype=torch.uint8)}
    store.publish(0, big)
    with serving_weights(tmp_path) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as stalled:
            stalled.sendall(b"GET /weights/actor/0/model.safetensors HTTP/1.1\r\nhost: x\r\n\r\n")
            first = stalled.recv(1000)
            assert first.startswith(b"HTTP/1.1 200")
            client = WeightClient()
            for version in (0, 1, 2, 3):
                if version:
                    store.publish(version, {"w": big["w"] + version})
                fetched = client.fetch(WeightVersion("actor", version, (f"{url}/weights/actor",)))
                assert int(fetched.tensors["w"][-1]) == version
            assert 0 in store.versions()  # what it reads stays while its lease lasts
            left = len(first.partition(b"\r\n\r\n")[2])
            while left < (24 << 20):  # and when it goes on, it gets the rest
                left += len(stalled.recv(1 << 20))
            client.close()


def test_a_reader_that_leaves_gives_its_file_back(tmp_path: Path) -> None:
    import torch

    store = FileStore(tmp_path, "actor", durable=False)
    store.publish(0, {"w": torch.zeros(24 << 20, dtype=torch.uint8)})
    with serving_weights(tmp_path) as url:
        address = urlsplit(url)

        def num_open() -> int:
            links = (
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if Path(f"/proc/self/fd/{fd}").is_symlink()
            )
            return sum(link.startswith(str(tmp_path)) and link.endswith("model.safetensors") for link in links)

        for _ in range(5):
            with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as leaving:
                leaving.sendall(b"GET /weights/actor/0/model.safetensors HTTP/1.1\r\nhost: x\r\n\r\n")
                leaving.recv(1000)
        if sys.platform == "linux":
            assert until(lambda: num_open() == 0)
        assert until(lambda: leased_versions(store.directory) == set())


def test_readers_of_manifests_share_one_lease(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "actor")
    store.publish(0, make_tensors(0))
    with serving_weights(tmp_path) as url:
        for _ in range(5):
            assert urllib3.request("GET", f"{url}/weights/actor/0/manifest.json").status == 200
        assert leased_versions(store.directory) == {0}
        assert len(list((store.directory / ".readers").glob("0.*"))) == 1


def test_what_many_ask_for_at_once_is_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(FileStore(tmp_path, "actor", full_every=50), range(4))
    merged, going, merges = FileStore.merged, threading.Event(), list[int]()

    def slow(self: FileStore, version: int, base: int) -> Delta | None:
        merges.append(base)
        going.wait(20)
        return merged(self, version, base)

    arrived, task = list[int](), app_module._Shared.task

    def counted(self: app_module._Shared, *words: Any) -> Any:
        arrived.append(len(arrived))
        return task(self, *words)

    monkeypatch.setattr(FileStore, "merged", slow)
    monkeypatch.setattr(app_module._Shared, "task", counted)
    with serving_weights(tmp_path) as url, ThreadPoolExecutor(8) as readers:
        urls = [f"{url}/weights/actor/3/delta?base={base}" for base in (0, 0, 0, 1, 0, 99)]
        asked = [readers.submit(urllib3.request, "GET", url) for url in urls]
        assert until(lambda: len(arrived) == 5), "all but the wrong one, before a merge is done"
        going.set()
        assert [a.result().status for a in asked] == [200] * 5 + [422]
        assert sorted(merges) == [0, 1]
        assert len({asked[i].result().data for i in (0, 1, 2, 4)}) == 1
        assert readers.submit(urllib3.request, "GET", urls[0]).result().status == 200 and len(merges) == 3


def test_readers_that_wait_for_a_version_are_one_look_at_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, "actor")
    store.publish(0, make_tensors(0))
    looks, decide, decided = list[int](), app_module._Serving._decision, app_module._Serving._is_decided
    arrived = list[int]()  # readers that wait at the same time

    def counted(self: app_module._Serving, policy: str, version: int) -> Coroutine[None, None, None]:
        looks.append(version)
        return decide(self, policy, version)

    def seen(self: app_module._Serving, policy: str, version: int) -> bool:
        arrived.append(self._waiting[policy, version])
        return decided(self, policy, version)

    monkeypatch.setattr(app_module._Serving, "_decision", counted)
    monkeypatch.setattr(app_module._Serving, "_is_decided", seen)
    with serving_weights(tmp_path) as url, ThreadPoolExecutor(8) as readers:

        def ask(wait_s: float) -> int:
            return urllib3.request("GET", f"{url}/weights/actor/1/manifest.json?wait_s={wait_s}", retries=False).status

        waiting = [readers.submit(ask, 60.0) for _ in range(5)]
        assert until(lambda: 5 in arrived)
        store.publish(1, make_tensors(1))
        assert [asked.result() for asked in waiting] == [200] * 5
    assert looks == [1]


def test_eight_servers_start_at_once_without_a_clash(tmp_path: Path) -> None:
    servers: list[ServerProcess] = []
    lock = threading.Lock()

    def start() -> None:
        server = start_server(tmp_path)
        with lock:
            servers.append(server)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({server.url for server in servers}) == 8
        assert all(server.alive() for server in servers)
    finally:
        for server in servers:
            server.stop()


def test_a_server_process_needs_its_token_and_starts_again(tmp_path: Path) -> None:
    FileStore(tmp_path, "actor").publish(0, make_tensors())
    server = start_server(tmp_path, token=TOKEN)
    try:
        wanted = WeightVersion("actor", 0, (server.policy_url("actor"),))
        client = WeightClient(TOKEN)
        assert same_bits(client.fetch(wanted).tensors, make_tensors())
        assert server.ensure() is False
        url, pid = server.url, server.pid
        assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text() if sys.platform == "linux" else True
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: not server.alive())
        assert server.ensure() is True
        assert server.url == url
        assert same_bits(client.fetch(wanted).tensors, make_tensors())
        assert server.num_restarts == 1
        client.close()
    finally:
        server.stop()
    assert not server.alive()


def test_a_used_port_and_an_open_host_are_refused_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"weights\.port=127\.0\.0\.1:{port} cannot be bound"):
            start_server(tmp_path, port=port)
    with pytest.raises(LaunchError, match="is not loopback and there is no token"):
        start_server(tmp_path, host="0.0.0.0")


def test_a_server_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from astraflow.weights.server import start_server\n"
        "s = start_server(Path(sys.argv[1])); print(json.dumps([s.url, s.pid]), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        url, _ = json.loads(parent.stdout.readline())
        parent.kill()
        parent.wait()
        address = urlsplit(url)

        def refused() -> bool:
            try:
                socket.create_connection((address.hostname, address.port), timeout=1).close()
            except OSError:
                return True
            return False

        assert until(refused)


def test_the_url_can_be_given_in_a_file(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "astraflow.weights.server", "--root", str(tmp_path), "--ready-file", str(ready)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as child:
        try:
            assert until(ready.exists)
            assert ready.read_text().startswith("http://127.0.0.1:")
        finally:
            child.terminate()
            child.wait()
