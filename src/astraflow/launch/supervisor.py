"""The thin shell around `supervision`: real processes, their logs, signals, and the dataflow service's word.

supervision (pure) ── Start / Signal ──► subprocesses ── exit codes ──► Exited
     ▲                                      └── ready file of dataflow ──► Ready
     └── Finished ◄── /status (a thread asks once a second, and feeds the progress display)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from astraflow.config.env import child_environment
from astraflow.config.schema import RunConfig
from astraflow.errors import AstraFlowError, LaunchError
from astraflow.launch.plan import DATAFLOW, ProcessSpec, plan_processes
from astraflow.launch.rundir import RunDirectory, read_ready, tail
from astraflow.launch.supervision import (
    Event,
    Exited,
    Failed,
    Finished,
    Interrupted,
    Limits,
    Ready,
    Signal,
    Start,
    Supervision,
    Tick,
    cause,
)
from astraflow.wire.client import HttpClient

TICK_S = 0.1
POLL_S = 1.0


class Progress(Protocol):
    """Where the launcher shows what happens."""

    def update(self, status: dict[str, Any]) -> None:
        """The newest reply of /status."""

    def note(self, text: str) -> None:
        """One line that stays: a process ended, was started again, the run ends."""


@dataclass
class _Child:
    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    log: IO[bytes]
    log_start: int  # bytes of earlier starts in its log


@dataclass
class Supervisor:
    """Keeps the processes of one run alive until it is over. The directory is claimed by its caller."""

    config: RunConfig
    directory: RunDirectory
    cores: int
    progress: Progress
    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    accept_damage: bool = False  # of the journal, at the first start of the dataflow service
    url: str | None = None  # of the dataflow service, once it answered; kept over its restarts
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # how processes are started

    def __post_init__(self) -> None:
        self._specs = {spec.name: spec for spec in plan_processes(self.config, self.cores)}
        self._state = Supervision(list(self._specs.values()), time.monotonic(), self.limits)
        self._children: dict[str, _Child] = {}
        self._wake = threading.Event()
        self._interrupts = 0
        self._poller: StatusPoller | None = None
        self._doors: dict[str, str] = {}  # process -> URL of its swarm door, kept over its restarts

    @property
    def num_restarts(self) -> int:
        """Processes that were started again."""
        return self._state.num_restarts

    def run(self) -> bool:
        """Run to the end; True when the run finished, False when it was interrupted.

        Raises: LaunchError: a process could not be kept alive; names it and its last words.
        """
        with self._signals():
            try:
                self._take(Tick())
                while self._state.phase != "done":
                    self._wake.wait(TICK_S)
                    self._wake.clear()
                    for event in self._events():
                        self._take(event)
            finally:
                self._clear_away()
        if self._state.failure is not None:
            raise LaunchError(
                "run", self.config.run.name, f"failed: {self._state.failure}", f"see {self.directory.logs}"
            )
        if self._state.finished and not self._interrupts:
            self._check_checkpoints()
        return self._state.succeeded

    def _check_checkpoints(self) -> None:
        processes = {policy: name for name, policies in self.config.trainers.items() for policy in policies}
        for policy in self.config.trained:
            steps = self.config.steps_of(policy)
            newest = self.directory.newest_checkpoint(policy)
            if newest is None or newest.name != f"step-{steps:06d}" or not self._state.succeeded:
                log = self.directory.log(f"trainer-{processes[policy]}")
                raise LaunchError(
                    "last checkpoint", newest, f"is not that of step {steps} of {policy}",
                    f"its trainer did not end well, see {log}; then go on with --resume",
                )  # fmt: skip

    def _take(self, event: Event) -> None:
        for instruction in self._state.handle(event, time.monotonic()):
            if isinstance(instruction, Start):
                self._start(instruction)
            else:
                self._signal(instruction)

    def _events(self) -> Iterator[Event]:
        while self._interrupts > self._state.interrupts:
            again = self._state.interrupts > 0
            self.progress.note(
                "ending at once" if again else "ending: trainers write a checkpoint; Ctrl-C again ends at once"
            )
            yield Interrupted()
        for name, child in list(self._children.items()):
            code = child.popen.poll()
            if code is not None:
                yield self._exited(name, child, code)
        dataflow = self._children.get(DATAFLOW)
        if dataflow is not None:
            url = read_ready(self.directory.ready_file, dataflow.popen.pid)
            if url is not None:
                self._answered(url)
                yield Ready()
        if self.config.rollout.swarm is not None:
            self._look_at_doors()
        if self._poller is not None:
            status = self._poller.newest()
            if status is not None:
                self.progress.update(status)
                if status["failure"] is not None:
                    yield Failed(status["failure"]["error"])
                elif status["finished"]:
                    yield Finished()
        yield Tick()

    def _look_at_doors(self) -> None:
        for name, child in self._children.items():
            if child.spec.role != "node" or name in self._doors:
                continue
            url = read_ready(self.directory.door_file(name), child.popen.pid)
            if url is not None:
                self._doors[name] = url
                self.progress.note(f"swarm clients join {name} at {url}")

    def _answered(self, url: str) -> None:
        self.url = url
        if self._poller is None:
            self._poller = StatusPoller(_local(url), self.token)
            if not self.config.rollout.nodes:
                self.progress.note(f"rollout.nodes=[] starts no node; one joins by: astraflow node --dataflow {url}")

    def _exited(self, name: str, child: _Child, code: int) -> Exited:
        child.log.close()
        del self._children[name]
        words = tail(self.directory.log(name), child.log_start)
        if code != 0 and self._state.phase in ("starting", "running"):
            last = words.rpartition("\n")[2]
            why = f": {last.removeprefix('error: ')}" if last.startswith("error: ") else ""
            self.progress.note(f"{name} ended with {cause(code)}{why}")
        return Exited(name, code, words)

    def _start(self, start: Start) -> None:
        spec = self._specs[start.name]
        if start.attempt > 1:
            self.progress.note(f"{spec.name} starts again (start {start.attempt})")
        log = self.directory.log(spec.name).open("ab")
        log_start = log.tell()
        try:
            popen = self.popen(
                [sys.executable, "-m", "astraflow", *self._arguments(spec)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self.token),
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )
        except OSError as error:
            log.close()
            fix = "raise the limits of this user (ulimit -u, ulimit -n), or end other processes"
            raise LaunchError("process", spec.name, f"cannot be started ({error.strerror})", fix) from error
        self._children[spec.name] = _Child(spec, popen, log, log_start)

    def _arguments(self, spec: ProcessSpec) -> list[str]:
        here = str(self.directory.path)
        parent = ["--parent", str(os.getpid())]
        if spec.role == "dataflow":
            host, port = self.config.dataflow.host, self.config.dataflow.port
            if self.url is not None:  # started again: nodes and trainers know its first port
                port = urlsplit(self.url).port or port
            where = ["--run-dir", here, "--resume", "--ready-file", str(self.directory.ready_file)]
            if self.accept_damage and self.url is None:
                where.append("--accept-damage")
            return ["dataflow", str(self.directory.config_file), "--host", host, "--port", str(port), *where, *parent]
        common = ["--dataflow", _local(self.url or ""), "--threads", str(spec.threads), *parent]
        if spec.role == "trainer":
            ranks = self.config.policies[spec.subject.partition(",")[0]].trainer.ranks
            return ["trainer", "--policy", spec.subject, "--run-dir", here, "--ranks", str(ranks), *common]
        if spec.role == "stage":
            return ["stage", spec.subject, *common]
        node = next(n for n in self.config.rollout.nodes if n.name == spec.subject)
        shape = ["--concurrency", str(node.concurrency), "--min-concurrency", str(node.min_concurrency)]
        shape += ["--workers", str(node.workers), "--delay-s", str(node.delay_s)]
        shape += ["--worker-memory-bytes", str(node.worker_memory_bytes), *(["--watch"] if node.watch else [])]
        shape += ["--serves", ",".join(node.serves)] if node.serves else []
        shape += ["--listen", node.listen] if node.listen else []
        return ["node", "--name", node.name, *shape, *self._door_of(spec), *common]

    def _door_of(self, spec: ProcessSpec) -> list[str]:
        """What opens the door of a node, on the port that clients know already if it is started again."""
        swarm = self.config.rollout.swarm
        if swarm is None:
            return []
        place = [node.name for node in self.config.rollout.nodes].index(spec.subject)
        port = urlsplit(self._doors.get(spec.name, "")).port or (swarm.port and swarm.port + place)
        host = f"[{swarm.host}]" if ":" in swarm.host else swarm.host
        return ["--swarm", f"{host}:{port}", "--swarm-ready-file", str(self.directory.door_file(spec.name))]

    def _signal(self, instruction: Signal) -> None:
        child = self._children.get(instruction.name)
        if child is not None:
            child.popen.send_signal(signal.SIGKILL if instruction.kill else signal.SIGTERM)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self._wake.set()

    def interrupt(self) -> None:
        """As Ctrl-C."""
        self._on_signal(signal.SIGINT, None)

    def _clear_away(self) -> None:
        """Nothing outlives the launcher, also when it fails itself."""
        if self._poller is not None:
            self._poller.close()
        for child in self._children.values():
            child.popen.kill()
            child.popen.wait()
            child.log.close()
        self._children.clear()


class StatusPoller:
    """Asks /status in a thread of its own, so that a slow answer never delays the launcher."""

    def __init__(self, url: str, token: str | None, interval_s: float = POLL_S) -> None:
        self._client = HttpClient(url, token, timeout_s=5.0, give_up_s=0.5)
        self._interval_s = interval_s
        self.num_failures = 0
        self._newest: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="status poller", daemon=True)
        self._thread.start()

    def newest(self) -> dict[str, Any] | None:
        """The last answer that was not yet taken, or None."""
        status, self._newest = self._newest, None
        return status

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._client.close()
        self._thread.join(timeout=10.0)

    def _poll(self) -> None:
        while not self._stop.is_set():
            try:
                self._newest = self._client.json("GET", "/status", None, dict[str, Any])
            except AstraFlowError:  # the service may be starting again; its process is watched elsewhere
                self.num_failures += 1
            self._stop.wait(self._interval_s)


def _local(url: str) -> str:
    """The URL that processes on this host use for a service bound to all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
