"""Runs that only a swarm of clients plays, while those are killed, stopped and cut off at random, by seed.

```
 dataflow service ◄── node, a door only ◄── clients (processes): SIGKILL and a new one, SIGSTOP for a while, or a life
 trainer (fake) ──►                         behind a flaky proxy; and once `kill -9` of the node itself
```
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from astraflow.config.load import check_run
from astraflow.config.schema import RunConfig
from astraflow.testing.faults.drill import GROUPS, Drill, Kill, Result, drill_config
from astraflow.testing.faults.flaky_proxy import FlakyProxy
from astraflow.testing.faults.swarm.player import play_forever

DEAD_AFTER_S = 0.8
_PROXIED = 3  # every third client lives behind a flaky proxy
_LONGEST_STOP_S = 2.5


def swarm_config(name: str, directory: Path, tasks: int) -> RunConfig:
    """As `drill_config`, played by clients."""
    raw = drill_config(name, directory, tasks, stage=False).model_dump(mode="json")
    raw["workflow"] |= {"type": "swarm", "max_attempts": 10}
    raw["rollout"] = {"nodes": [{"name": "node", "workers": 0}], "swarm": {"dead_after_s": DEAD_AFTER_S}}
    return check_run(raw, name)


@dataclass
class _Client:
    """One place in the swarm: when its process dies another one takes it."""

    number: int
    url: str
    process: ForkServerProcess
    starts: int = 1
    stopped_until: float = 0.0  # monotonic; 0: it runs


class SwarmDrill(Drill):
    """`every_s`: mean time between two torments of the whole swarm."""

    def __init__(self, config: RunConfig, directory: Path, cache: Path, *, clients: int, every_s: float) -> None:
        super().__init__(config, directory, cache, node_process=True)
        self.torments: Counter[str] = Counter()
        self._proxy: FlakyProxy | None = None
        self.longest_gap_s = 0.0  # between two steps, from the first on
        self._chance = random.Random(config.run.seed)
        self._num_clients, self._every_s = clients, every_s
        self._clients: list[_Client] = []
        self._next = 0.0
        self._step: tuple[int, float] = (0, 0.0)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["astraflow.testing.faults.swarm.player"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._door = f"127.0.0.1:{probe.getsockname()[1]}"

    @property
    def faults(self) -> str:
        """What happened to clients, for people."""
        cut = 0 if self._proxy is None else self._proxy.counts.total()
        words = ", ".join(f"{what} {count}" for what, count in sorted(self.torments.items()))
        return f"{self._num_clients} clients: {words}, {cut} bad requests; longest step {self.longest_gap_s:.1f} s"

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        return [*command, "--workers", "0", "--swarm", self._door] if name == "node" else command

    def _start(self, name: str) -> None:
        super()._start(name)
        if name == "node" and not self._clients:
            direct = f"http://{self._door}"
            proxy = self._closing.enter_context(FlakyProxy(direct, self._config.run.seed, rate=0.15, max_faults=10_000))
            for number in range(self._num_clients):
                url = proxy.url if number % _PROXIED == 0 else direct
                self._clients.append(_Client(number, url, self._spawn(number, url, 0)))

    def _spawn(self, number: int, url: str, start: int) -> ForkServerProcess:
        process = self._context.Process(
            target=play_forever, args=(url, f"c{number}", 100 * number + start), daemon=True
        )
        process.start()
        return process

    def _look(self) -> dict[str, Any] | None:
        now = time.monotonic()
        status = super()._look()
        if status is not None and status["accounting"]["trained"] // GROUPS > self._step[0]:
            step = status["accounting"]["trained"] // GROUPS
            if self._step[0]:
                self.longest_gap_s = max(self.longest_gap_s, now - self._step[1])
            self._step = (step, now)
        for client in self._clients:
            self._mend(client, now)
        if self._clients and now >= self._next:
            self._next = now + self._chance.expovariate(1.0 / self._every_s)
            self._torment(self._chance.choice(self._clients), now)
        return status

    def _mend(self, client: _Client, now: float) -> None:
        """A process that is gone is started again; one that was stopped long enough goes on."""
        if client.stopped_until and now >= client.stopped_until:
            client.stopped_until = 0.0
            self._signal(client, signal.SIGCONT)
        if not client.process.is_alive() and not self._status.get("finished"):
            client.process = self._spawn(client.number, client.url, client.starts)
            client.starts += 1
            self.torments["started again"] += 1

    def _torment(self, client: _Client, now: float) -> None:
        if client.stopped_until or self._status.get("finished"):
            return
        if self._chance.random() < 0.5:
            self.torments["killed"] += 1
            self._signal(client, signal.SIGKILL)
            client.process.join(5.0)
        else:
            self.torments["stopped"] += 1
            self._signal(client, signal.SIGSTOP)
            client.stopped_until = now + self._chance.uniform(0.1, _LONGEST_STOP_S)

    def _signal(self, client: _Client, number: signal.Signals) -> None:
        if client.process.is_alive() and client.process.pid is not None:
            os.kill(client.process.pid, number)

    def _close(self) -> None:
        for client in self._clients:
            self._signal(client, signal.SIGKILL)
            client.process.join(5.0)
        super()._close()


def swarm_drill(
    parent: Path,
    cache: Path,
    seed: int,
    *,
    clients: int = 20,
    tasks: int = 400,
    every_s: float = 0.25,
    kill_node: bool = True,
) -> Result:
    """One run of `tasks` tasks that so many clients play."""
    config = swarm_config(f"swarm-{seed}", parent, tasks)
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    drill = SwarmDrill(config, parent / config.run.name, cache, clients=clients, every_s=every_s)
    drill.result = Result(seed, "")
    result = drill.run([Kill("node", tasks // 2, 0.0)] if kill_node else [])
    result.faults = drill.faults
    return result
