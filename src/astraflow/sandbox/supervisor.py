"""The process that owns all boxes of one `Sandbox`. It ends, and they with it, when the other end of its socket does.

A process of its own, so that a box is started from a small program, by threads that stay (a box dies with the thread
that started it), and is reaped by nobody else.
"""

from __future__ import annotations

import collections
import logging
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from astraflow.sandbox.box import BoxError
from astraflow.sandbox.isolation import FIRST_UID, Way, find_way
from astraflow.sandbox.records import Ask, Health, Job, Settings, Told, Verdict
from astraflow.sandbox.slot import Slot

log = logging.getLogger("astraflow.sandbox")
HEALTH_S = 30.0
_LOOK_S = 0.1  # between two looks at the memory of boxes that run
_USERS = 1 << 21  # sets of users that supervisors draw from, so that those of one host have different ones
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Supervisor:
    """Reads jobs from `channel`, answers verdicts in the order in which they come."""

    def __init__(self, channel: socket.socket, settings: Settings, way: Way) -> None:
        self._channel, self._settings, self._way = channel, settings, way
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._health = Health()
        self._walls: collections.deque[float] = collections.deque(maxlen=1000)
        num = settings.slots or len(os.sched_getaffinity(0))
        first = FIRST_UID + random.SystemRandom().randrange(_USERS) * 256
        self._slots = [Slot(way, settings, first + 2 * place, self._health) for place in range(num)]

    def serve(self) -> None:
        """Until the other side is gone."""
        threads = [threading.Thread(target=self._work, args=(slot,), daemon=True) for slot in self._slots]
        for thread in [*threads, threading.Thread(target=self._look, daemon=True)]:
            thread.start()
        lines = self._channel.makefile("rb")
        for line in lines:
            ask = msgspec.json.decode(line, type=Ask)
            self._jobs.put((ask.number, ask.job))
        for _ in self._slots:
            self._jobs.put(None)
        for slot in self._slots:
            if (running := slot.watched) is not None:
                running[0].kill()
        for thread in threads:
            thread.join(5.0)

    def _work(self, slot: Slot) -> None:
        try:
            while (item := self._jobs.get()) is not None:
                number, job = item
                verdict = slot.run(job)
                self._count(verdict)
                self._tell(Told(number, verdict))
                with suppress(BoxError):  # the next job says why
                    slot.warm_up()
        except Exception as error:  # a slot that is lost would be missed by nobody: all end, and the client says so
            log.exception("a slot of the sandbox failed (%s)", error)
            self._channel.shutdown(socket.SHUT_RDWR)
        finally:
            slot.end()

    def _count(self, verdict: Verdict) -> None:
        health = self._health
        with self._sending:
            health.jobs += 1
            setattr(health, verdict.outcome, getattr(health, verdict.outcome) + 1)
            self._walls.append(verdict.wall_s * 1e3)

    def _tell(self, told: Told) -> None:
        with self._sending, suppress(OSError):  # nobody listens: the end of the socket ends this process
            self._channel.sendall(msgspec.json.encode(told) + b"\n")

    def _look(self) -> None:
        """Watch the memory of what runs; tell of health."""
        told_at, told = time.monotonic(), 0
        while True:
            threading.Event().wait(_LOOK_S)
            now = time.monotonic()
            running = [s.watched for s in self._slots]
            old = [box for box, since in filter(None, running) if now - since > _LOOK_S]
            if old and self._way.bwrap:
                used = _resident_bytes()
                for box in old:
                    if box.root is not None and used.get(_namespace(box.root), 0) > self._settings.memory_bytes:
                        self._health.memory_kills += 1
                        box.memory_killed = True
                        box.kill()
            if now - told_at >= HEALTH_S and self._health.jobs != told:
                told_at, told = now, self._health.jobs
                self._tell(Told(health=self._now()))

    def _now(self) -> Health:
        walls = sorted(self._walls)
        if walls:
            self._health.p50_ms = round(walls[len(walls) // 2], 1)
            self._health.p99_ms = round(walls[len(walls) * 99 // 100], 1)
        self._health.waiting = self._jobs.qsize()
        return self._health


def _resident_bytes() -> dict[int, int]:
    """Pid namespace -> resident bytes of its processes; pages that several share are counted for each."""
    found: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            pages = int(Path(entry.path, "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
        if pages and (space := _namespace(int(entry.name))):
            found[space] = found.get(space, 0) + pages * _PAGE_BYTES
    return found


def _namespace(pid: int) -> int:
    """Of pids; 0: not known."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def main(number: str, settings: str) -> None:
    """`number`: of the socket's file; `settings`: as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who asks for verdicts decides when to end
    with socket.socket(fileno=int(number)) as channel:
        chosen = msgspec.json.decode(settings, type=Settings)
        Supervisor(channel, chosen, find_way(chosen.isolation, chosen.python)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
