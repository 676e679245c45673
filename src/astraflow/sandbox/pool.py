"""What the rest of the system uses: `Sandbox.run(job)`, from any loop or thread."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import lru_cache

import msgspec

from astraflow.sandbox.isolation import usable
from astraflow.sandbox.records import Ask, Health, Job, Settings, Told, Verdict

log = logging.getLogger(__name__)
_END_S = 10.0


class Sandbox:
    """Boxes for jobs, `settings.slots` at a time; the rest waits. Thread-safe. Its process starts with the first job,
    and again with the first after one that it did not survive; it ends with this process, however that ends."""

    def __init__(self, settings: Settings | None = None, where: str = "sandbox") -> None:
        """Raises: Problem: there is no such isolation here, and how to get it."""
        self.settings = settings or Settings()
        usable(self.settings, where)
        self.health: Health | None = None  # the newest that is known
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Verdict]] = {}
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, job: Job) -> Future[Verdict]:
        """The verdict to come; it never fails."""
        future: Future[Verdict] = Future()
        with self._lock:
            channel = self._channel or self._start()
            number = next(self._numbers)
            self._waiting[number] = future
        try:
            line = msgspec.json.encode(Ask(number, job)) + b"\n"
            with self._lock:
                channel.sendall(line)
        except OSError as error:
            self._settle(number, _lost(f"its supervisor is gone ({error})", job))
        return future

    async def run(self, job: Job) -> Verdict:
        """The verdict."""
        return await asyncio.wrap_future(self.submit(job))

    def close(self) -> None:
        """End all boxes; jobs that wait get the verdict "error"."""
        with self._lock:
            channel, process, self._channel, self._process = self._channel, self._process, None, None
        if channel is not None and process is not None:
            _shut(channel)
            _ended(process)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), msgspec.json.encode(self.settings).decode()]
        searched = os.pathsep.join(filter(None, sys.path))
        with theirs:
            # none of this process's variables: what runs beside hostile code knows no secret
            self._process = subprocess.Popen(
                [sys.executable, "-m", "astraflow.sandbox.supervisor", *words], pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, env={"PATH": os.defpath, "PYTHONPATH": searched},
                start_new_session=True,
            )  # fmt: skip
        self._channel = ours
        threading.Thread(target=self._listen, args=(ours, self._process), name="sandbox", daemon=True).start()
        return ours

    def _listen(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        with channel, channel.makefile("rb") as lines:
            try:
                for line in lines:
                    told = msgspec.json.decode(line, type=Told)
                    if told.verdict is not None:
                        self._settle(told.number, told.verdict)
                    if told.health is not None:
                        self.health = told.health
                        log.info("sandbox: %s", _line(told.health))
            except (OSError, msgspec.DecodeError) as error:
                log.error("sandbox: its supervisor was not understood (%s)", error)
        with self._lock:
            if self._channel is channel:
                self._channel = self._process = None
            left, self._waiting = self._waiting, {}
        status = _ended(process)
        for future in left.values():
            if not future.cancelled():
                future.set_result(Verdict(outcome="error", why=f"its supervisor ended (exit {status})"))

    def _settle(self, number: int, verdict: Verdict) -> None:
        with self._lock:
            future = self._waiting.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(verdict)


def _lost(why: str, job: Job) -> Verdict:
    return Verdict(outcome="error", num_tests=len(job.tests) + len(job.cases), why=why)


def _shut(channel: socket.socket) -> None:
    try:
        channel.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("the socket of a sandbox was closed before (%s)", error)


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _line(health: Health) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in msgspec.structs.asdict(health).items())


@lru_cache(maxsize=8)
def shared(settings: Settings, where: str = "sandbox") -> Sandbox:
    """The one sandbox of this process with these settings. Raises: Problem: as `Sandbox`."""
    sandbox = Sandbox(settings, where)
    atexit.register(sandbox.close)
    return sandbox
