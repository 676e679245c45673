"""Fault drills: small runs as real processes whose parts are killed, or whose requests are disturbed, by seed.

```
 dataflow service ◄── node (scripted engine, worker process) · trainer (fake) · stage      kill -9, or a flaky proxy
```

A run is right when every admitted task was trained exactly once or dropped with a reason, by three witnesses: the books
of the service, the histories of its tasks, and what the trainer wrote down.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from astraflow.config.env import child_environment
from astraflow.config.load import check_run, resolved_json
from astraflow.config.schema import RunConfig
from astraflow.dataflow.journal.history import Moment
from astraflow.dataflow.journal.recovery import recover
from astraflow.dataflow.machine.records import State
from astraflow.dataflow.views.law import imbalance, task_imbalance
from astraflow.errors import AstraFlowError, LaunchError
from astraflow.rollout.node import NodeOptions, serve_node
from astraflow.testing.faults.flaky_proxy import FlakyProxy
from astraflow.testing.runs import astraflow_command, children_of
from astraflow.wire.client import HttpClient

Victim = Literal["dataflow", "node", "worker", "trainer", "stage"]
VICTIMS: tuple[Victim, ...] = ("dataflow", "node", "worker", "trainer", "stage")
GROUPS = 10
_TICK_S = 0.02
_LIMIT_S = 90.0


class Kill(NamedTuple):
    """`kill -9` of one process `delay_s` after so many tasks were admitted."""

    victim: Victim
    tasks: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.victim}@{self.tasks}+{self.delay_s * 1000:.0f}ms"


@dataclass
class Result:
    """One run. `problems`: sentences about what is wrong with it."""

    seed: int
    faults: str
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def kills_of(seed: int, count: int, tasks: int) -> list[Kill]:
    """The kills of one run, in order; every kind of victim comes up over the seeds."""
    chance = random.Random(seed)
    moments = sorted(chance.randrange(0, tasks) for _ in range(count))
    victims = [VICTIMS[(seed * count + i) % len(VICTIMS)] for i in range(count)]
    chance.shuffle(victims)
    return [Kill(v, t, round(chance.uniform(0.0, 0.2), 3)) for v, t in zip(victims, moments, strict=True)]


def drill_config(name: str, directory: Path, tasks: int, *, stage: bool) -> RunConfig:
    """One policy, batches of 10 groups of 4 episodes, staleness 1; deadlines short, snapshots frequent."""
    raw: dict[str, Any] = {
        "run": {"name": name, "directory": str(directory), "steps": tasks // GROUPS, "checkpoint_every": 4},
        "sources": {"train": {"type": "sums", "size": 1000}},
        "workflow": {
            "type": "astraflow.testing.faults.script:play",
            "group_size": 4,
            "timeout_s": 4,
            "max_attempts": 4,
        },
        "policies": {
            "actor": {
                "model": "tiny-char",
                "engine": {"type": "scripted", "script": "astraflow.testing.faults.script:digit", "delay_s": 0.002},
                "batch": {"groups": GROUPS, "max_staleness": 1},
                "sampling": {"max_tokens": 4},
            }
        },
        "dataflow": {"heartbeat_s": 0.2, "dead_after_s": 1.5, "batch_lease_s": 5.0, "snapshot_every": 150},
    }
    if stage:
        raw["stages"] = {"echo": {"type": "astraflow.testing.stages:EchoStage", "lease_s": 1.0, "max_attempts": 5}}
    return check_run(raw, name)


class Drill:
    """The processes of one run, started again when they die."""

    def __init__(self, config: RunConfig, directory: Path, cache: Path, *, node_process: bool) -> None:
        self._config, self._directory, self._cache, self._in_thread = config, directory, cache, not node_process
        self.result = Result(config.run.seed, "")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._ended: set[str] = set()
        self._closing = ExitStack()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.direct_url = self.url = f"http://127.0.0.1:{self._port}"
        self._status: dict[str, Any] = {}

    def run(self, kills: list[Kill], proxy_seed: int | None = None) -> Result:
        """The whole run."""
        begin, waiting = time.monotonic(), list(kills)
        self._directory.mkdir(parents=True)
        (self._directory / "run.resolved.json").write_text(resolved_json(self._config))
        try:
            self._start("dataflow")
            self._client = HttpClient(self.direct_url, give_up_s=0.1, timeout_s=5.0)
            self._wait(lambda: self._look() is not None, "dataflow to answer")
            if proxy_seed is not None:
                proxy = self._closing.enter_context(FlakyProxy(self.direct_url, proxy_seed, rate=0.4))
                self.url = proxy.url
            for name in ["trainer", "node", *self._config.stages]:
                self._start(name)
            while not self._over():
                status = self._look()
                while status is not None and waiting and status["accounting"]["admitted"] >= waiting[0].tasks:
                    self._kill(waiting.pop(0))
                if time.monotonic() - begin > _LIMIT_S:
                    raise LaunchError("drill", str(self._directory), f"did not end in {_LIMIT_S:g} s", "see its logs")
                threading.Event().wait(_TICK_S)
            if waiting:
                self.result.problems.append(f"not killed in time: {', '.join(map(str, waiting))}")
            if proxy_seed is not None:
                self.result.faults = ", ".join(f"{k} {n}" for k, n in sorted(proxy.counts.items()))
        except AstraFlowError as error:
            self.result.problems.append(str(error))
        finally:
            self._close()
        self.result.wall_s = time.monotonic() - begin
        self._judge()
        return self.result

    def _start(self, name: str) -> None:
        if name == "node" and self._in_thread:
            self._node_thread()
            return
        log = self._directory / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as out:
            self._processes[name] = subprocess.Popen(
                self._command(name), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=child_environment(None, {"ASTRAFLOW_CACHE": str(self._cache)}),
            )  # fmt: skip

    def _command(self, name: str) -> list[str]:
        parent = ["--parent", str(os.getpid())]
        match name:
            case "dataflow":
                where = ["--run-dir", str(self._directory), "--resume", "--port", str(self._port)]
                return astraflow_command("dataflow", str(self._directory / "run.resolved.json"), *where, *parent)
            case "node":
                shape = ["--dataflow", self.url, "--name", "node", "--concurrency", "32"]
                return astraflow_command("node", *shape, *parent)
            case "trainer":
                module = "astraflow.testing.faults.fake_trainer"
                return [sys.executable, "-m", module, self.url, str(self._directory), "actor"]
        return astraflow_command("stage", name, "--dataflow", self.url, *parent)

    def _node_thread(self) -> None:
        options = NodeOptions(dataflow_url=self.url, name="node", concurrency=32, cache=self._cache)

        def main() -> None:
            try:
                asyncio.run(serve_node(options))
            except AstraFlowError as error:
                self.result.problems.append(f"node: {error}")

        thread = threading.Thread(target=main, name="node", daemon=True)
        thread.start()
        self._closing.callback(thread.join, 20.0)

    def _look(self) -> dict[str, Any] | None:
        """The status of the service; starts again what died."""
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None or name in self._ended:
                continue
            if code == 0:
                self._ended.add(name)
                continue
            self.result.restarts += 1
            if process.pid not in self._killed:
                raise LaunchError("drill", name, f"ended by itself with code {code}", f"see {self._directory / 'logs'}")
            self._start(name)
        try:
            self._status = self._client.json("GET", "/status", None, dict[str, Any])
        except AstraFlowError:
            return None
        return self._status

    def _over(self) -> bool:
        return bool(self._status.get("finished")) and "trainer" in self._ended

    def _kill(self, kill: Kill) -> None:
        threading.Event().wait(kill.delay_s)
        self._wait(lambda: self._pid(kill.victim) is not None, f"{kill.victim} to live")
        pid = self._pid(kill.victim)
        assert pid is not None
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def _pid(self, victim: Victim) -> int | None:
        if victim == "worker":
            node = os.getpid() if self._in_thread else self._processes["node"].pid
            words = [(pid, _command_line(pid)) for pid in children_of(node)]
            return next((pid for pid, line in words if b"rollout.worker" in line and pid not in self._killed), None)
        process = self._processes.get("echo" if victim == "stage" else victim)
        return process.pid if process is not None and process.poll() is None else None

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 30.0
        while not condition():
            self._look()
            if time.monotonic() > end:
                raise LaunchError("drill", what, "did not happen in 30 s", f"see {self._directory / 'logs'}")
            threading.Event().wait(_TICK_S)

    def _close(self) -> None:
        for name in sorted(self._processes, key=lambda n: n == "dataflow"):
            process = self._processes[name]
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.result.problems.append(f"{name} did not end on SIGTERM")
        self._closing.close()

    def _judge(self) -> None:
        judge(self._directory, self._config, self.result)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def judge(directory: Path, config: RunConfig, result: Result) -> None:
    """Fill `result` from what a run of one policy left, and say what is wrong with it."""
    found = recover(directory / "dataflow")
    if found.snapshot is None or found.damage or found.log:
        result.problems.append(f"the journal was not closed well: {found.damage or len(found.log)}")
        return
    state = msgspec.json.decode(found.snapshot.state, type=State)
    policy = state.policies["actor"]
    result.admitted, result.trained, result.dropped = policy.admitted, policy.trained, dict(policy.dropped)
    wrong = result.problems
    if imbalance(state, "actor") or task_imbalance(state):
        wrong.append(f"the law does not hold: {imbalance(state, 'actor')}, {task_imbalance(state)}")
    if policy.in_flight or policy.trained != config.run.steps * GROUPS:
        wrong.append(f"{policy.in_flight} tasks are in flight, {policy.trained} trained, at the end")
    trained, dropped, admitted = read_lives(directory / "dataflow" / "history")
    if len(admitted) != policy.admitted:
        wrong.append(f"{len(admitted)} tasks were admitted by their histories, {policy.admitted} by the books")
    for task in admitted:
        ends = len(trained.get(task, ())) + dropped[task]
        if ends != 1:
            wrong.append(
                f"task {task} was trained in steps {sorted(trained.get(task, ()))}, dropped {dropped[task]} times"
            )
    wrong += told_by_the_trainer(directory / "trained-actor.jsonl", config.run.steps)


def read_lives(directory: Path) -> tuple[dict[str, set[int]], Counter[str], set[str]]:
    """Of all histories: task -> steps that trained it; how often each was dropped; tasks admitted for training."""
    trained: dict[str, set[int]] = {}
    dropped: Counter[str] = Counter()
    admitted: set[str] = set()
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            moment = msgspec.json.decode(line, type=Moment)
            match moment.what:
                case "admitted" if moment.fields["purpose"] == "train":
                    admitted.add(moment.task)
                case "trained":
                    trained.setdefault(moment.task, set()).add(moment.fields["step"])
                case "dropped":
                    dropped[moment.task] += 1
    return trained, dropped, admitted


def told_by_the_trainer(path: Path, steps: int) -> list[str]:
    """What is wrong with the batches that the trainer noted: each step once, or again with the same episodes."""
    batches: dict[int, list[str]] = {}
    wrong = []
    for line in path.read_text().splitlines():
        note = json.loads(line)
        if batches.setdefault(note["step"], note["episodes"]) != note["episodes"]:
            wrong.append(f"batch {note['step']} came again with other episodes")
    seen = Counter(episode for episodes in batches.values() for episode in set(episodes))
    wrong += [f"episode {episode} came in {count} batches" for episode, count in seen.items() if count > 1]
    if sorted(batches) != list(range(1, steps + 1)):
        wrong.append(f"the trainer got batches {sorted(batches)}")
    return wrong


def kill_drill(parent: Path, cache: Path, seed: int, kills: int, tasks: int = 200) -> Result:
    """One run of `tasks` tasks with so many kills."""
    planned = kills_of(seed, kills, int(tasks * 0.9))
    victims = {kill.victim for kill in planned}
    config = drill_config(f"kills-{seed}", parent, tasks, stage="stage" in victims)
    drill = Drill(config, parent / config.run.name, cache, node_process="node" in victims)
    drill.result = Result(seed, ", ".join(map(str, planned)))
    return drill.run(planned)


def network_drill(parent: Path, cache: Path, seed: int, tasks: int = 200) -> Result:
    """One run of `tasks` tasks behind a flaky proxy."""
    config = drill_config(f"network-{seed}", parent, tasks, stage=seed % 2 == 1)
    drill = Drill(config, parent / config.run.name, cache, node_process=False)
    drill.result = Result(seed, "")
    return drill.run([], proxy_seed=seed)
