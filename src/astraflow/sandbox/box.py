"""One box: a program in isolation, and its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from astraflow.errors import AstraFlowError
from astraflow.sandbox.calls import filter_file
from astraflow.sandbox.isolation import Way, environment
from astraflow.sandbox.records import Settings

Program = Literal["candidate", "driver"]
_MODULES: dict[Program, tuple[str, ...]] = {"candidate": ("values", "candidate"), "driver": ("values", "far", "driver")}
START_S = 20.0  # for a box to say that it is ready, on a busy host
END_S = 10.0  # for a killed process to be gone
MAX_MESSAGE = 1 << 20  # of a driver, whose tests may be a model's
_DRIVER_BYTES = 1 << 30

_COMPILE = """
import marshal, sys
parts = sys.stdin.read().split("\\0")
made = [(n, compile(t, n, "exec")) for n, t in zip(parts[::2], parts[1::2])]
sys.stdout.buffer.write(marshal.dumps(made))
"""
# Compiled once, and sent into each box: nothing of this package's files is mounted there.
_BOOT = """
import marshal, os, resource as r, sys
fd, limit, size, memory, cpu, processes, disk = map(int, sys.argv[1:])
for kind, most in ((r.RLIMIT_AS, memory), (r.RLIMIT_CPU, cpu), (r.RLIMIT_FSIZE, disk), (r.RLIMIT_CORE, 0),
                   (r.RLIMIT_NOFILE, 128), (r.RLIMIT_NPROC, processes)):
    if most >= 0: r.setrlimit(kind, (most, most))
text = b""
while len(text) < size: text += os.read(fd, size - len(text))
for name, code in marshal.loads(text):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(fd, limit)
"""


class BoxError(AstraFlowError):
    """A box could not be started or used; nothing that its code did."""


class Spent(NamedTuple):
    """Nanoseconds of a process on a core, and waiting for one."""

    ran_ns: int
    waited_ns: int


class Box:
    """Starts at once; `ready` waits until its program can be talked to."""

    def __init__(self, way: Way, settings: Settings, program: Program, uid: int) -> None:
        text = _programs(way.python, program)
        self.socket, inside = socket.socketpair()
        try:
            with inside:
                numbers = (inside.fileno(), settings.output_bytes, len(text), *_limits(way, settings, program))
                words = ["-c", _BOOT, *map(str, numbers)]
                with filter_file() as calls:
                    self._process = subprocess.Popen(
                        way.command(uid, settings.disk_bytes, calls, words), stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(inside.fileno(), calls),
                        env=environment(), start_new_session=True, cwd="/tmp",
                    )  # fmt: skip
            self.socket.sendall(text)
        except OSError as error:
            self.socket.close()
            raise BoxError(f"a box could not be started ({error})") from error
        self.memory_killed = False
        self._root: int | None = None

    def ready(self) -> None:
        """Raises: BoxError: it does not start."""
        try:
            self.hear(time.monotonic() + START_S)
        except (OSError, EOFError, ValueError) as error:
            raise BoxError(f"a box did not start ({error or 'it ended'}; exit {self.end()})") from error

    def hear(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises: TimeoutError, EOFError, OSError; ValueError: it is none, or too long."""
        size = int.from_bytes(self._exactly(4, deadline), "big")
        if size > MAX_MESSAGE:
            raise ValueError("its message is too long")
        told = json.loads(self._exactly(size, deadline))
        if not isinstance(told, dict):
            raise ValueError("it said something else than a message")
        return told

    def give(self, message: dict[str, Any], candidate: Box, deadline: float) -> None:
        """A message, and the connection to `candidate`, which this process then no longer has."""
        body = json.dumps(message).encode()
        candidate.socket.settimeout(None)  # or the one who gets it could not wait
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))
        socket.send_fds(self.socket, [b"!"], [candidate.socket.fileno()])
        self.socket.sendall(len(body).to_bytes(4, "big") + body)
        candidate.socket.close()

    def _exactly(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.socket.recv(size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    @property
    def root(self) -> int | None:
        """Pid of its first process as the host counts; None: it has none, or is weak and has no root of its own."""
        if self._root is None:
            pid = self._process.pid
            with suppress(OSError, ValueError, IndexError):
                self._root = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return self._root

    def spent(self) -> Spent | None:
        """Of its first process; None: not known."""
        try:
            ran, waited = Path(f"/proc/{self.root or self._process.pid}/schedstat").read_text().split()[:2]
        except (OSError, ValueError):
            return None
        return Spent(int(ran), int(waited))

    def ended_by(self, wait_s: float) -> int | None:
        """The signal that ended its first process; 0: none; None: it is still there after `wait_s`."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        return -status if status < 0 else max(0, status - 128)

    def kill(self) -> None:
        """All that is in it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill it and wait for that; the exit status."""
        self.socket.close()
        if self._process.poll() is None:
            self.kill()
        return self._process.wait(END_S)


def _limits(way: Way, settings: Settings, program: Program) -> tuple[int, int, int, int]:
    """Bytes of memory, seconds of CPU, processes, bytes of a file; -1: no limit.

    Without a user of their own, weak boxes share the count of processes with everything that their user runs.
    """
    if program == "driver":
        return _DRIVER_BYTES, -1, 16 if way.own_users or way.bwrap else -1, settings.output_bytes
    processes = settings.processes + 2 if way.own_users or way.bwrap else -1
    return settings.memory_bytes, settings.cpu_s, processes, settings.output_bytes


@lru_cache(maxsize=4)
def _programs(python: str, program: Program) -> bytes:
    """The modules of a program as code of the interpreter that will run them."""
    parts: list[str] = []
    for name in _MODULES[program]:
        module = f"astraflow.sandbox.inside.{name}"
        parts += [module, (files("astraflow.sandbox.inside") / f"{name}.py").read_text()]
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE], input="\0".join(parts).encode(), capture_output=True, check=True,
            timeout=START_S, env=environment(),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise BoxError(f"{python} cannot compile the programs of a box ({error})") from error
    return done.stdout
