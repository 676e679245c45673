"""Whole runs as real processes, and the means to kill their parts. Used by tests, benchmarks and fault drills.

run = LaunchedRun.start(tmp_path, "quickstart", "--run.steps=3")
run.wait_for_step(2); run.kill("trainer"); assert run.wait(60) == 0; run.summary()["accounting"]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from astraflow.config.env import child_environment
from astraflow.errors import LaunchError

Role = Literal["dataflow", "trainer", "node", "stage"]
_TICK_S = 0.05


def astraflow_command(*words: str) -> list[str]:
    """`astraflow <words>` with this interpreter."""
    return [sys.executable, "-m", "astraflow", *words]


def wait_until(condition: Callable[[], bool], what: str, limit_s: float) -> None:
    """Poll `condition`.

    Raises: LaunchError: it did not hold within `limit_s`; names `what`.
    """
    end, tick = time.monotonic() + limit_s, threading.Event()
    while not condition():
        if time.monotonic() > end:
            raise LaunchError("wait", what, f"did not happen within {limit_s:g} s", "see the logs of the run")
        tick.wait(_TICK_S)


@dataclass
class LaunchedRun:
    """One `astraflow run` and its run directory."""

    directory: Path
    popen: subprocess.Popen[bytes]
    output: Path  # what the launcher printed
    _killed: list[int] = field(default_factory=list)

    @classmethod
    def start(
        cls, parent: Path, recipe: str, *words: str, name: str = "run", environment: Mapping[str, str] | None = None
    ) -> LaunchedRun:
        """Start a run in `parent/name`. `words`: overrides and flags such as --resume."""
        parent.mkdir(parents=True, exist_ok=True)
        output = parent / f"{name}.out"
        place = (f"--run.directory={parent}", f"--run.name={name}")
        with output.open("ab") as out:
            popen = subprocess.Popen(
                astraflow_command("run", recipe, *words, *place),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=child_environment(None, environment),
            )
        return cls(parent / name, popen, output)

    def wait(self, limit_s: float) -> int:
        """The launcher's exit code. On timeout everything is killed and TimeoutExpired raised."""
        try:
            return self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise

    def end(self) -> None:
        """SIGKILL for the launcher; its children die with it."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    def interrupt(self) -> None:
        """As Ctrl-C."""
        self.popen.send_signal(signal.SIGINT)

    def words(self) -> str:
        """Everything the launcher printed, and the end of every log."""
        parts = [self.output.read_text(errors="replace")]
        for log in sorted((self.directory / "logs").glob("*.log")):
            parts.append(f"--- {log.name}\n" + log.read_text(errors="replace")[-3000:])
        return "\n".join(parts)

    def pids(self, role: Role) -> list[int]:
        """Processes of this run that serve `role`, started by the launcher (Linux)."""
        return [pid for pid in children_of(self.popen.pid) if _verb(pid) == role]

    def kill(self, role: Role) -> int:
        """`kill -9` of one process of `role`; returns its pid.

        Raises: LaunchError: there is none (it just died, or the run is over).
        """
        pids = [pid for pid in self.pids(role) if pid not in self._killed]
        if not pids:
            raise LaunchError("role", role, "has no living process", "kill it while the run goes on")
        os.kill(pids[0], signal.SIGKILL)
        self._killed.append(pids[0])
        return pids[0]

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        try:
            text = (self.directory / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    def wait_for_step(self, step: int, limit_s: float = 300.0) -> None:
        """Until metrics.jsonl has a row of `step` or a later one, or the run ended."""

        def reached() -> bool:
            return self.popen.poll() is not None or any(row.get("step", -1) >= step for row in self.metrics())

        wait_until(reached, f"step {step} of {self.directory}", limit_s)

    def summary(self) -> dict[str, Any]:
        """report/summary.json."""
        loaded: dict[str, Any] = json.loads((self.directory / "report" / "summary.json").read_text())
        return loaded


def children_of(pid: int) -> list[int]:
    """Processes that this one started (Linux)."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has just ended
            found += [int(word) for word in task.read_text().split()]
    return found


def _verb(pid: int) -> str:
    """The verb of a `python -m astraflow <verb>` process, else ""."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return words[3].decode() if len(words) > 3 and words[1:3] == [b"-m", b"astraflow"] else ""
