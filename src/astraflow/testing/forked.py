"""Processes that start in a moment: forked from one that has loaded torch, which takes seconds.

`popen` takes the place of `subprocess.Popen` for commands of this interpreter (`python -m module ...`, `python file
...`): real processes with their own id, session, signals and exit code. What they import is loaded already, so tests of
the start itself use `subprocess`. Linux and macOS.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from astraflow.config.env import become
from astraflow.observe.process import seldom_collected

LOADED = (
    "astraflow.cli.app",
    "astraflow.cli.services",
    "astraflow.dataflow.client",
    "astraflow.dataflow.service",
    "astraflow.engines.local.engine",
    "astraflow.launch.claim",
    "astraflow.rollout.node",
    "astraflow.stages.ref_logprobs",
    "astraflow.stages.worker",
    "astraflow.training.trainer",
)
_LOCK = threading.Lock()  # two threads must not look at the end of one process at once
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(LOADED))


class ForkedProcess:
    """As far as it is needed, a `subprocess.Popen`."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._process = _CONTEXT.Process(target=_begin, args=(target, arguments), daemon=True)
        with _LOCK:
            self._process.start()
        self.pid: int = self._process.pid or 0
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, -N after signal N, None while it runs."""
        if self.returncode is None:
            with _LOCK:
                self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises: subprocess.TimeoutExpired: it runs on."""
        if self.poll() is None:
            wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended since: its parent, the fork server, has reaped it
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def popen(
    words: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], cwd: Path | str | None = None, **ignored: Any
) -> Any:
    """Start `words`, of which the first is this interpreter. It has a session of its own; errors go to `stdout` too."""
    if words[0] != sys.executable:
        raise ValueError(f"words[0]={words[0]} must be {sys.executable}; use subprocess.Popen for anything else")
    ready, told = _CONTEXT.Pipe(duplex=False)
    with ready:
        with told:
            process = ForkedProcess(_main, (list(words[1:]), stdout.name, dict(env), str(cwd or Path.cwd()), told))
        ready.poll(30.0)  # its session exists: it can be signalled as a group
    return process


def _begin(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with seldom_collected():
        gc.freeze()  # what was loaded before belongs to all who were forked: a look at it would copy it
        target(*arguments)


def _main(words: list[str], log: str, env: dict[str, str], cwd: str, told: Any) -> None:
    os.setsid()
    with Path(log).open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    told.close()
    become(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(cwd)
    if "--parent" in words:  # whoever forked is the parent, and ends with whoever asked it to fork
        words[words.index("--parent") + 1] = str(os.getppid())
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
