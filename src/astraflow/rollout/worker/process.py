"""One worker process as its node sees it: started in a process group of its own, which ends as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from astraflow.config.env import child_environment
from astraflow.rollout.worker.channel import Channel, Hello, Message
from astraflow.rollout.worker.code import SourceFile
from astraflow.rollout.worker.output import Drain

P = TypeVar("P")


@dataclass(eq=False)
class Generation:
    """The code that several workers share. `files`: what they imported of it, for those that are started later."""

    code: str = ""  # version; "": not known yet
    files: dict[str, SourceFile] = field(default_factory=dict)


@dataclass(eq=False)
class WorkerProcess(Generic[P]):
    """A process, what it plays, and how it fares."""

    process: subprocess.Popen[bytes]
    channel: Channel
    drain: Drain
    generation: Generation
    trial: bool  # of edited code; plays nothing until it is known to work
    born: float
    pulsed: float  # monotonic, when it was last heard of
    episodes: dict[int, tuple[P, float, str]] = field(default_factory=dict)  # slot -> player, deadline, "" or its error
    left_running: int = 0
    ready: bool = False
    retiring: bool = False  # gets no more episodes
    reaped: bool = False
    why: str = ""  # it was killed: error of its episodes

    @property
    def able(self) -> bool:
        """It takes episodes."""
        return self.ready and not self.retiring

    def kill(self, why: str = "") -> None:
        """At once, with what it started; the end of its channel settles its episodes."""
        self.why = self.why or why
        kill_group(self.process)


async def start_worker(
    hello: Hello,
    generation: Generation,
    trial: bool,
    max_output_per_s: int,
    on_message: Callable[[WorkerProcess[Any], Message], None],
    on_lost: Callable[[WorkerProcess[Any]], None],
) -> WorkerProcess[Any]:
    """A worker that was told `hello`; both callbacks are called on this loop."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    read, write = os.pipe()
    try:
        with theirs:
            process = _start_process(theirs.fileno(), write)
    finally:
        os.close(write)

    def flooded() -> None:
        worker.kill(f"output: its worker process wrote more than {max_output_per_s} bytes in a second")

    channel = Channel(lambda message: on_message(worker, message), lambda: on_lost(worker))
    drain = Drain(f"worker {process.pid}", max_output_per_s, flooded)
    now = time.monotonic()
    worker: WorkerProcess[Any] = WorkerProcess(process, channel, drain, generation, trial, now, now)
    await loop.connect_read_pipe(lambda: drain, os.fdopen(read, "rb", buffering=0))
    await loop.create_unix_connection(lambda: channel, sock=ours)
    channel.send(hello)
    return worker


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """The process and those of its children that made no session of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait a moment for each, then kill it; blocks. Nothing that they started stays."""
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        kill_group(process)
        process.wait()


def _start_process(channel: int, output: int) -> subprocess.Popen[bytes]:
    """It finds what this process can import, and does not get the token."""
    environment = child_environment(None, {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    return subprocess.Popen(
        [sys.executable, "-m", "astraflow.rollout.worker", str(channel)], pass_fds=(channel,),
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
    )  # fmt: skip
