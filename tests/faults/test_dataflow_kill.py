"""`kill -9` of the dataflow service while a node and a trainer work against it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import Unreachable
from astraflow.testing.dataflow import episode, small_config
from astraflow.types import EpisodeLease
from astraflow.wire import messages as m

pytestmark = pytest.mark.faults

CONFIG = small_config(run__steps=100_000, dataflow={"snapshot_every": 10})
NUM_KILLS = 3
Spawn = Callable[[], tuple[subprocess.Popen[str], str]]

SERVICE = textwrap.dedent(
    """
    import pathlib, sys
    from astraflow.config.load import config_from_json
    from astraflow.dataflow import shell
    from astraflow.dataflow.service import run_service
    from astraflow.testing.dataflow import sources
    from astraflow.wire.app import bind
    shell.open_sources = lambda config: sources()
    run_dir = pathlib.Path(sys.argv[1])
    config = config_from_json((run_dir / "config.json").read_text())
    run_service(config, run_dir, bind("127.0.0.1", 0, "dataflow.port"), token=None,
                on_ready=lambda url: (sys.stdout.write(url + "\\n"), sys.stdout.flush()))
    """
)


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    (tmp_path / "config.json").write_text(CONFIG.model_dump_json())
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SERVICE, str(tmp_path)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Work:
    """A node and a trainer in one; what the service answered is remembered."""

    def __init__(self) -> None:
        self.held: list[EpisodeLease] = []
        self.committed: list[EpisodeLease] = []
        self.num_requests = 0
        self.trained: list[str] = []
        self.version = 0

    def enter(self, client: DataflowClient, trainer: str) -> None:
        run_id = client.run().run_id
        client.join(m.Join(node_id="n", name="n", capacity=8, run_id=run_id))
        client.resume("actor", m.Resume(trainer_id=trainer, version=self.version, urls=(), run_id=run_id))

    def turn(self, client: DataflowClient, trainer: str) -> None:
        if not self.held:
            self.held = client.lease("n", 3, request_id=f"r{self.num_requests}").leases
            self.num_requests += 1
        while self.held:
            lease = self.held[0]
            done = episode(lease, "n", float(int(lease.episode_id[-1]) % 2), self.version)
            assert client.commit([done])[lease.episode_id] in ("accepted", "duplicate")
            self.committed.append(self.held.pop(0))
        got = client.batch("actor", trainer, self.version)
        if got is not None:
            client.ack(got[0], trainer)
            self.trained += got[1].column("episode_id").to_pylist()
            self.version = got[0].step


def test_a_service_killed_at_any_moment_keeps_what_it_answered(spawn: Spawn) -> None:
    chance, work = random.Random(7), Work()
    for life in range(NUM_KILLS):
        process, url = spawn()
        client = DataflowClient(url, give_up_s=0.2)
        killer = threading.Timer(chance.uniform(0.05, 0.6), process.send_signal, [signal.SIGKILL])
        with pytest.raises(Unreachable):
            work.enter(client, f"t{life}")
            killer.start()
            while True:
                work.turn(client, f"t{life}")
        client.close()
        process.wait()
    _, url = spawn()
    client = DataflowClient(url)
    assert set(client.commit([episode(x, "n") for x in work.committed]).values()) == {"duplicate"}
    work.enter(client, "last")
    goal = work.version + 5
    while work.version < goal:
        work.turn(client, "last")
    account = client.status()["accounting"]
    client.close()
    assert len(work.trained) == len(set(work.trained)), "an episode was trained twice"
    assert account["trained"] == 2 * work.version
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
