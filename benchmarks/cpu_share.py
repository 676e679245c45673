"""CPU time of every process of a run, by role, read while they live."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import psutil

ROLES = ("dataflow", "trainer", "node")


class CpuWatch:
    """Samples the CPU time (user + system) of a launcher and all its descendants until `stop`.

    A process that ends loses at most one interval. Samples carry their time, so a later window can be cut out.
    """

    def __init__(self, pid: int, interval_s: float = 0.2) -> None:
        self._root = psutil.Process(pid)
        self._interval_s = interval_s
        self._roles: dict[tuple[int, float], str] = {}
        self._seen: dict[tuple[int, float], float] = {}
        self._samples: list[tuple[float, dict[str, float]]] = []  # time.time(), CPU seconds by role so far
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cpu watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def between(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds by role from `start` to `end` (time.time())."""
        before, after = self._at(start), self._at(end)
        return {role: after[role] - before.get(role, 0.0) for role in after}

    def _at(self, moment: float) -> dict[str, float]:
        earlier = [cpu for t, cpu in self._samples if t <= moment]
        return earlier[-1] if earlier else {}

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                tree = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in tree:
                try:
                    with process.oneshot():
                        key = (process.pid, process.create_time())
                        if self._roles.get(key, "launcher") == "launcher":  # a fork takes its role when it execs
                            self._roles[key] = _role(process)
                        times = process.cpu_times()
                        self._seen[key] = times.user + times.system
                except psutil.NoSuchProcess:
                    continue
            total: dict[str, float] = defaultdict(float)
            for key, cpu in self._seen.items():
                total[self._roles[key]] += cpu
            self._samples.append((time.time(), dict(total)))


def _role(process: psutil.Process) -> str:
    """The service that a process is or belongs to, `worker` for a node's workers, `launcher` for the rest."""
    if "astraflow.rollout.worker" in process.cmdline()[1:3]:
        return "worker"
    for ancestor in [process, *process.parents()]:
        for word in ancestor.cmdline()[2:4]:  # python -m astraflow <verb>
            if word in ROLES:
                return word
    return "launcher"
