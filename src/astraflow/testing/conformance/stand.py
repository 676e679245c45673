"""Where an act is played: a real service with a tap in a thread, and the process under test, which can be killed.

The process is told where it is by environment variables and by placeholders in its command:

| placeholder | variable                 | what                                                        |
|-------------|--------------------------|-------------------------------------------------------------|
| {url}       | ASTRAFLOW_DATAFLOW_URL   | of the service                                              |
| {policy}    | ASTRAFLOW_POLICY         | the policy of the run                                       |
| {stage}     | ASTRAFLOW_STAGE          | the stage of the run                                        |
| {consumer}  | ASTRAFLOW_CONSUMER       | the consumer of the run                                     |
| {dir}       | ASTRAFLOW_DIR            | a directory of its own, the same when it is started again   |
|             | ASTRAFLOW_TOKEN          | the bearer token                                            |
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from astraflow.config.env import child_environment
from astraflow.config.load import check_run
from astraflow.config.schema import RunConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.tap import Exchange, Tap
from astraflow.testing.services import DataflowThread

POLICY, STAGE, CONSUMER = "actor", "echo", "reader"
HEARTBEAT_S, DEAD_AFTER_S, TIMEOUT_S = 0.2, 3.0, 20.0
_TICK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is put to the test."""

    command: Sequence[str]  # with placeholders
    patience_s: float = 60.0  # for it to start, and to do what is waited for
    model: str = ""  # rollouts: a model whose weights are published; "": bytes without a meaning
    stage_type: str = "astraflow.testing.stages:EchoStage"  # stages: what the run file names
    settings: dict[str, Any] = field(default_factory=dict)  # changes of the run file: "workflow.type" -> value
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # how it is started


class ActOver(Exception):
    """What was waited for did not happen; a finding says so."""


def run_file(
    candidate: Candidate, *, steps: int, stage: bool = False, consumer: bool = False, **changes: Any
) -> RunConfig:
    """A small run: batches of 2 groups of 2 episodes, staleness 1. `sources__train__pause_s=1` changes a setting."""
    raw: dict[str, Any] = {
        "run": {"name": "conformance", "steps": steps, "checkpoint_every": 2},
        "sources": {"train": {"type": "astraflow.testing.conformance.player:Questions"}},
        "workflow": {
            "type": "astraflow.testing.conformance.player:play",
            "group_size": 2,
            "timeout_s": TIMEOUT_S,
            "max_attempts": 5,
        },
        "policies": {
            POLICY: {
                "model": candidate.model or "tiny-char",
                "engine": "local" if candidate.model else {
                    "type": "scripted", "script": "astraflow.testing.faults.script:digit"
                },
                "batch": {"groups": 2, "max_staleness": 1},
                "operators": ["keep_all"],
                "sampling": {"max_tokens": 4},
            }
        },
        "dataflow": {"heartbeat_s": HEARTBEAT_S, "dead_after_s": DEAD_AFTER_S, "batch_lease_s": DEAD_AFTER_S},
    }  # fmt: skip
    if stage:
        raw["stages"] = {STAGE: {"type": candidate.stage_type, "workers": 0, "rows": 8, "lease_s": DEAD_AFTER_S}}
    if consumer:
        raw["consumers"] = {CONSUMER: {}}
    dotted = {name.replace("__", "."): value for name, value in changes.items()} | dict(candidate.settings)
    for path, value in dotted.items():
        node, (*parents, last) = raw, path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return check_run(raw, "conformance")


class Stand:
    """One act. `findings` collects what is seen; counterparts are added with `enter`."""

    def __init__(self, place: Path, config: RunConfig, candidate: Candidate, findings: Findings) -> None:
        self.findings, self.config, self._candidate = findings, config, candidate
        self.directory = place / "own"
        self.directory.mkdir(parents=True)
        self._log = place / "process.log"
        self.token = secrets.token_hex(8)
        self.tap = Tap()
        self._closing = ExitStack()
        self.service = self._closing.enter_context(
            DataflowThread(config, place / "service", self.token, wrap=self.tap.wrap)
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self.starts: list[float] = []  # of the process
        self.away: list[tuple[float, float]] = []  # when the service could not be reached

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            _kill(process)
        self._closing.close()

    def enter(self, counterpart: Any) -> None:
        """A fake that plays until the act is over."""
        self._closing.enter_context(counterpart)

    def client(self) -> DataflowClient:
        """A client of the one who tests."""
        client = DataflowClient(self.service.url, self.token, give_up_s=10.0)
        self._closing.callback(client.close)
        return client

    def restart_service(self) -> None:
        """The service is away for a second."""
        begin = time.monotonic()
        self.service.restart(pause_s=1.0)
        self.away.append((begin, time.monotonic() + 2.0))  # who asks pauses between two tries

    def start(self) -> None:
        """Start the process under test, or start it again."""
        place = {"url": self.service.url, "dir": str(self.directory)}
        given = {**place, "policy": POLICY, "stage": STAGE, "consumer": CONSUMER}
        words = [_filled(word, given) for word in self._candidate.command]
        names = {"url": "DATAFLOW_URL"} | {name: name.upper() for name in given if name != "url"}
        extra = {f"ASTRAFLOW_{names[name]}": value for name, value in given.items()}
        self.starts.append(time.monotonic())
        with self._log.open("ab") as log:
            self._processes.append(
                self._candidate.popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env=child_environment(self.token, extra),
                )
            )  # fmt: skip

    def kill(self) -> None:
        """`kill -9`."""
        _kill(self._processes[-1])

    def tell_to_end(self) -> None:
        """SIGTERM."""
        self._processes[-1].send_signal(signal.SIGTERM)

    @property
    def alive(self) -> bool:
        """The process runs."""
        return self._processes[-1].poll() is None

    def seen(self, which: Callable[[Exchange], bool]) -> list[Exchange]:
        """Exchanges so far."""
        return [x for x in list(self.tap.exchanges) if which(x)]

    def wait(self, rule: str, what: str, condition: Callable[[], Any]) -> None:
        """Until `condition`; else `rule` is broken and the act is over."""
        end = time.monotonic() + self._candidate.patience_s
        while not condition():
            if not self.alive:
                self.findings.hold(rule, False, f"its process ended with {self._code} and did not {what}")
                raise ActOver
            if time.monotonic() > end:
                self.findings.hold(rule, False, f"it did not {what} within {self._candidate.patience_s:g} s")
                raise ActOver
            threading.Event().wait(_TICK_S)

    def let_pass(self, seconds: float) -> None:
        """Watch for a while."""
        threading.Event().wait(seconds)

    def ends(self, rule: str, when: str, *, code: int | None = 0) -> None:
        """The process ends by itself; `code` None: with any."""
        end = time.monotonic() + self._candidate.patience_s
        while self.alive and time.monotonic() < end:
            threading.Event().wait(_TICK_S)
        self.findings.hold(rule, not self.alive, f"its process did not end {when}")
        if not self.alive and code is not None:
            wrong = f"its process ended with {self._code} {when}"
            self.findings.hold(rule, self._processes[-1].returncode == code, wrong)

    def tail(self, size: int = 1500) -> str:
        """The end of what the process wrote."""
        return self._log.read_text(errors="replace")[-size:] if self._log.exists() else ""

    @property
    def _code(self) -> str:
        return f"code {self._processes[-1].returncode}"


def _filled(word: str, given: dict[str, str]) -> str:
    for name, value in given.items():
        word = word.replace("{" + name + "}", value)
    return word


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
