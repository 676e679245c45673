"""Time that jumps from event to event, processors that are shared, and lines that send one byte after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from astraflow.errors import Problem

MOST_EVENTS = 5_000_000  # without a step of any policy


class Clock:
    """Events in order of time, equal times in order of their planning. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_since_step = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """`act` once so many seconds have passed."""
        self._planned += 1
        heapq.heappush(self._heap, (self.now + seconds, self._planned, act))

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`. Raises: Problem: nothing happens any more, or only what leads to no step."""
        while not over():
            self.num_since_step += 1
            if not self._heap or self.num_since_step > MOST_EVENTS:
                raise Problem(
                    "simulation", f"{self.now:.6g} s", "must come to the next step",
                    "see whether episode.calls of the profile has each trained policy, and whether `kept` is above 0",
                )  # fmt: skip
            self.now, _, act = heapq.heappop(self._heap)
            act()


class Work:
    """So many seconds of one core are left of it."""

    __slots__ = ("done", "left_s")

    def __init__(self, left_s: float, done: Callable[[], None]) -> None:
        self.left_s, self.done = left_s, done


class Host:
    """`cores` processors that all running works share equally, none faster than one core; 0: one core for each."""

    def __init__(self, clock: Clock, cores: float = 0.0) -> None:
        self._clock, self._cores = clock, cores
        self._works: list[Work] = []
        self._since = 0.0
        self._plan = 0

    def start(self, seconds: float, done: Callable[[], None]) -> Work:
        """A work that begins now; `done` is called at its end."""
        self._settle()
        work = Work(seconds, done)
        self._works.append(work)
        self._replan()
        return work

    def left_s(self, work: Work) -> float:
        """What is left of a running work."""
        self._settle()
        return work.left_s

    def shorten(self, work: Work, left_s: float) -> None:
        """A running work ends earlier than planned."""
        self._settle()
        work.left_s = left_s
        self._replan()

    @property
    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._works)) if self._cores else 1.0

    def _settle(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if passed and self._works:
            done_s = passed * self._rate
            for work in self._works:
                work.left_s -= done_s

    def _replan(self) -> None:
        self._plan += 1
        if self._works:
            plan, first = self._plan, min(self._works, key=lambda work: work.left_s)
            self._clock.after(max(0.0, first.left_s) / self._rate, lambda: self._due(plan, first))

    def _due(self, plan: int, work: Work) -> None:
        if plan != self._plan:
            return
        self._settle()
        self._works.remove(work)
        self._replan()
        work.done()


class Line:
    """One direction of a link. `mbit` 0: no limit."""

    def __init__(self, clock: Clock, mbit: float) -> None:
        self._clock, self._bytes_per_s = clock, mbit * 1e6 / 8
        self._free_at = 0.0
        self.num_bytes, self.num_messages = 0.0, 0

    def send(self, num_bytes: float) -> float:
        """Seconds until the last byte has left, behind all that was sent before."""
        self.num_bytes += num_bytes
        self.num_messages += 1
        if not self._bytes_per_s:
            return 0.0
        self._free_at = max(self._free_at, self._clock.now) + num_bytes / self._bytes_per_s
        return self._free_at - self._clock.now


class Fifo:
    """A serial server: one work after the other. `busy_s` counts wall time."""

    def __init__(self, host: Host) -> None:
        self._host, self._queue, self._busy = host, list[tuple[float, Callable[[], None]]](), False

    def add(self, seconds: float, done: Callable[[], None]) -> None:
        """Behind all others; one of no length ends at once."""
        if seconds <= 0.0 and not self._busy:
            done()
            return
        self._queue.append((seconds, done))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        seconds, done = self._queue.pop(0)

        def end() -> None:
            self._busy = False
            done()
            self._next()

        self._host.start(seconds, end)
