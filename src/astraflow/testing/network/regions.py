"""A run in two regions of one host: data service and trainers in A, nodes and perhaps a relay in B, a link between.

```
 region A                                     link                         region B
 dataflow ◄── trainer          bandwidth and delay, all bytes counted          node, node, ...
    ▲            │ weights server  ◄─────────────────────────────────────────   │  (each by itself, or)
    └────────────┼─────────────────────────────────────────────────────────────┤
                 └─────────────────────────────────────────────────────────── relay ◄── nodes
```
Processes of B share no memory and no directory with A (`ASTRAFLOW_SHARED_MEMORY=0`) and know only URLs of the link.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from astraflow.config.env import child_environment
from astraflow.config.load import resolved_json
from astraflow.config.schema import RunConfig
from astraflow.errors import LaunchError
from astraflow.launch.rundir import read_ready, tail
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.shaper import Shaper, Traffic
from astraflow.testing.runs import astraflow_command, wait_until

_TICK_S = 0.05
_STARTED_S, _LEAVING_S = 60.0, 60.0


@dataclass(frozen=True)
class Region:
    """What is in region B."""

    nodes: int = 2
    concurrency: int = 16  # episodes played at once by each node
    threads: int = 1  # intra-op threads of a node's engine
    relay: bool = False


class Passed(NamedTuple):
    """What had passed the link when the row of a step was there (step 0: when the run began)."""

    step: int
    time_s: float  # since the run began
    data: Traffic  # to and from the data service
    weights: Traffic  # from the trainer's weights server: down


@dataclass
class Outcome:
    """A run that came to its end."""

    steps: list[dict[str, Any]] = field(default_factory=list)  # rows of metrics.jsonl
    passed: list[Passed] = field(default_factory=list)  # one for each step
    wall_s: float = 0.0


class TwoRegions:
    """One run of `config` in `place`, its policy one. `popen`: how processes are started."""

    def __init__(
        self, config: RunConfig, place: Path, link: Conditions, region: Region = Region(),
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:  # fmt: skip
        self._config, self._place, self._conditions, self._region, self._popen = config, place, link, region, popen
        self._processes: dict[str, Any] = {}
        self._open = ExitStack()

    def run(self, limit_s: float) -> Outcome:
        """The whole run.

        Raises: LaunchError: one of its processes failed, or it did not end in time; with the last words of the logs.
        """
        self._place.mkdir(parents=True)
        with self._open:
            self._open.callback(self._end)
            link = self._open.enter_context(Shaper(self._conditions))
            data_port, weights_port = _free_ports(2)
            here = f"http://127.0.0.1:{data_port}"
            data, weights = link.forward(here), link.forward(f"http://127.0.0.1:{weights_port}")
            settings = {"port": weights_port, "announce": weights}
            config = self._config.model_copy(
                update={"weights": self._config.weights.model_copy(update=settings)}, deep=True
            )
            self._start_processes(config, here, data, data_port)
            return self._watch(limit_s, lambda: (link.traffic(data), link.traffic(weights)))

    def _start_processes(self, config: RunConfig, here: str, far: str, port: int) -> None:
        file = self._place / "run.json"
        file.write_text(resolved_json(config))
        run_dir, ready = self._place / "a", self._place / "ready.json"
        where = ["--run-dir", str(run_dir), "--port", str(port), "--ready-file", str(ready)]
        dataflow = self._start("dataflow", "dataflow", str(file), *where)
        wait_until(lambda: read_ready(ready, dataflow.pid) is not None or self._failed(), "the service", _STARTED_S)
        for policy in config.policies:
            threads = ["--threads", str(config.policies[policy].trainer.threads)]
            self._start(
                "trainer", "trainer", "--dataflow", here, "--policy", policy, "--run-dir", str(run_dir), *threads
            )
        if self._region.relay:
            self._start("relay", "relay", "--dataflow", far, "--directory", str(self._place / "b" / "relay"))
        shape = ["--concurrency", str(self._region.concurrency), "--threads", str(self._region.threads)]
        for i in range(self._region.nodes):
            self._start(f"node{i}", "node", "--dataflow", far, "--name", f"b{i}", *shape)

    def _start(self, name: str, *words: str) -> Any:
        there = {} if name in ("dataflow", "trainer") else {"ASTRAFLOW_SHARED_MEMORY": "0"}
        with self._log(name).open("ab") as out:
            process = self._popen(
                astraflow_command(*words, "--parent", str(os.getpid())),
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=child_environment(None, there),
            )  # fmt: skip
        self._processes[name] = process
        return process

    def _watch(self, limit_s: float, passed: Callable[[], tuple[Traffic, Traffic]]) -> Outcome:
        outcome, begin, tick = Outcome(), time.monotonic(), threading.Event()
        outcome.passed.append(Passed(0, 0.0, *passed()))
        while self._processes["trainer"].poll() is None:
            self._failed()
            now = time.monotonic() - begin
            self._look(outcome, now, passed)
            if now > limit_s:
                raise LaunchError("two regions", f"{now:.0f} s", f"must end in {limit_s:g} s", self._words())
            tick.wait(_TICK_S)
        self._failed()
        outcome.wall_s = time.monotonic() - begin
        self._look(outcome, outcome.wall_s, passed)  # the last rows came since the last look
        return outcome

    def _look(self, outcome: Outcome, now: float, passed: Callable[[], tuple[Traffic, Traffic]]) -> None:
        """Into `outcome` what metrics.jsonl has `now` seconds after the run began."""
        metrics = self._place / "a" / "metrics.jsonl"
        rows = read_jsonl(metrics) if metrics.exists() else []
        outcome.steps = [dict(row) for row in rows if row["kind"] == "step"]
        while len(outcome.passed) <= len(outcome.steps):
            outcome.passed.append(Passed(len(outcome.passed), now, *passed()))

    def _failed(self) -> bool:
        """False. Raises: LaunchError: a process ended with an error."""
        for name, process in self._processes.items():
            if process.poll():
                raise LaunchError("process", name, f"ended with {process.poll()}", self._words())
        return False

    def _words(self) -> str:
        logs: Sequence[Path] = sorted(self._place.glob("*.log"))
        return "\n".join(["its logs say:", *(f"--- {log.name}\n{tail(log)}" for log in logs)])

    def _log(self, name: str) -> Path:
        return self._place / f"{name}.log"

    def _end(self) -> None:
        """Region B leaves by itself when the run is over; the service stays until it is told."""
        deadline = time.monotonic() + _LEAVING_S
        told = sorted(self._processes, key=lambda name: name == "dataflow")
        for name in told:
            process = self._processes[name]
            if name == "dataflow" or process.poll() is None:
                process.terminate()
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in found]
