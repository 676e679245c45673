"""`ProcessPool.call` and `Seat.call`: from any loop or thread."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict, replace

from astraflow.config.env import child_environment
from astraflow.processes.process import Process
from astraflow.processes.records import Ask, CallFailed, Health, Hello, Kind, Settings

log = logging.getLogger(__name__)
HEALTH_S = 30.0
_MAX_FAILED_STARTS = 3  # in a row; then calls fail at once
_PAUSE_S = 30.0  # for so long; then it is tried again


@dataclass(eq=False)
class _Job:
    ask: Ask
    deadline_s: float
    future: Future[Any] = field(default_factory=Future)


@dataclass(eq=False)
class _Place:
    """A thread and the process that it keeps. `generation` counts its processes: seats belong to one of them."""

    generation: int = 0
    process: Process | None = None
    queue: deque[_Job] = field(default_factory=deque)  # of its seats
    seats: int = 0
    used: int = 0
    busy: bool = False


class Seat:
    """A right to one process until `release`: what its target keeps between two calls is there for the next one. Its
    calls run in their order; other seats of the process take turns with it."""

    def __init__(self, pool: ProcessPool, place: _Place) -> None:
        self._pool, self._place, self._generation = pool, place, place.generation

    async def call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Raises: CallFailed; after "lost" and "deadline" the seat is no more."""
        return await asyncio.wrap_future(self.submit(method, *arguments, deadline_s=deadline_s))

    def submit(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Future[Any]:
        """The same for threads."""
        return self._pool._submit(_job(self._pool, method, arguments, deadline_s), self._place, self._generation)

    def release(self) -> None:
        """Others may sit there. Does nothing the second time."""
        generation, self._generation = self._generation, -1
        self._pool._leave(self._place, generation)

    async def __aenter__(self) -> Seat:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class ProcessPool:
    """Processes that each made `target` (`module:Object`) with `options`, and answer calls of its public methods.

    Arguments and answers are what JSON carries. A call past its deadline is failed and its process killed, with the
    seats on it; the next one starts at once. Processes start with the first calls, and end with this process.
    """

    def __init__(
        self, name: str, target: str, options: Mapping[str, Any] | None = None, settings: Settings | None = None,
        *, clean: bool = False,
    ) -> None:  # fmt: skip
        """`name`: for the log. `clean`: processes get no variables of this one but the search paths."""
        self.name, self.settings = name, settings or Settings()
        self._hello = Hello(target, dict(options or {}), self.settings.memory_bytes)
        self._environment = _environment(clean)
        self._size = self.settings.processes or len(os.sched_getaffinity(0))
        self._changed = threading.Condition()
        self._places: list[_Place] = []
        self._shared: deque[_Job] = deque()
        self._asking: deque[Future[Seat]] = deque()  # for a seat
        self._failed_starts, self._no_start, self._no_start_until, self._closed = 0, "", 0.0, False
        self._health, self._told_at, self._told = Health(), time.monotonic(), 0
        self._walls: deque[float] = deque(maxlen=1000)
        atexit.register(self.close)

    async def call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Any process answers. Raises: CallFailed."""
        return await asyncio.wrap_future(self.submit(method, *arguments, deadline_s=deadline_s))

    def submit(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Future[Any]:
        """The same for threads."""
        return self._submit(_job(self, method, arguments, deadline_s))

    async def seat(self) -> Seat:
        """On the process with the fewest; waits until one is free. Raises: CallFailed: the pool is closed."""
        future: Future[Seat] = Future()
        with self._changed:
            self._asking.append(future)
        self._seat_all()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel() and not future.cancelled() and future.exception() is None:
                future.result().release()
            raise

    def health(self) -> Health:
        """Now."""
        with self._changed:
            return self._now()

    def close(self) -> None:
        """End all processes; what waits or runs fails."""
        with self._changed:
            self._closed = True
            left = [*self._shared, *(job for place in self._places for job in place.queue)]
            asking = list(self._asking)
            self._shared.clear()
            self._asking.clear()
            for place in self._places:
                place.queue.clear()
            processes = [place.process for place in self._places if place.process is not None]
            self._changed.notify_all()
        for future in [*(job.future for job in left), *asking]:
            _fail(future, CallFailed("closed", f"the processes of {self.name} were ended"))
        for process in processes:
            process.end()
        atexit.unregister(self.close)

    def _submit(self, job: _Job, place: _Place | None = None, generation: int = 0) -> Future[Any]:
        kind: Kind | None = None
        why = ""
        with self._changed:
            if self._closed:
                kind, why = "closed", f"the processes of {self.name} were ended"
            elif self._no_start and time.monotonic() < self._no_start_until:
                kind, why = "start", self._no_start
            elif place is None:
                self._shared.append(job)
                if len(self._places) < self._size and len(self._shared) > sum(not p.busy for p in self._places):
                    self._add_place()
            elif place.generation == generation:
                place.queue.append(job)
            else:
                kind, why = "lost", "the process of this seat has ended"
            self._changed.notify_all()
        if kind is not None:
            _fail(job.future, CallFailed(kind, why))
        return job.future

    def _add_place(self) -> _Place:
        place = _Place()
        self._places.append(place)
        threading.Thread(target=self._work, args=(place,), name=self.name, daemon=True).start()
        return place

    def _seat_all(self) -> None:
        """Give seats to those who ask while there are any."""
        while True:
            with self._changed:
                if not self._asking:
                    return
                failure: CallFailed | None = None
                if self._closed:
                    failure = CallFailed("closed", f"the processes of {self.name} were ended")
                elif (place := self._free_place()) is None:
                    return
                else:
                    place.seats += 1
                    place.used += 1
                    seat = Seat(self, place)
                future = self._asking.popleft()
            if failure is not None:
                _fail(future, failure)
            elif future.set_running_or_notify_cancel():
                future.set_result(seat)
            else:
                seat.release()

    def _free_place(self) -> _Place | None:
        free = [p for p in self._places if p.seats < self.settings.seats and not self._worn(p)]
        best = min(free, key=lambda p: p.seats, default=None)
        if (best is None or best.seats) and len(self._places) < self._size:
            return self._add_place()
        return best

    def _worn(self, place: _Place) -> bool:
        return bool(self.settings.recycle_after) and place.used >= self.settings.recycle_after

    def _leave(self, place: _Place, generation: int) -> None:
        with self._changed:
            if place.generation == generation:
                place.seats -= 1
                self._changed.notify_all()
        self._seat_all()

    def _work(self, place: _Place) -> None:
        """The life of a place; its process ends with this thread."""
        try:
            while (job := self._next(place)) is not None:
                if job.future.set_running_or_notify_cancel():
                    self._run(place, job)
                self._tell()
        finally:
            if place.process is not None:
                place.process.end()

    def _next(self, place: _Place) -> _Job | None:
        """What this place does next; None: the pool is closed."""
        while True:
            with self._changed:
                place.busy = False
                while not self._closed and not (self._worn(place) and not place.seats):
                    if place.queue:
                        place.busy = True
                        return place.queue.popleft()
                    if self._shared and not self._worn(place):
                        place.busy = True
                        place.used += 1
                        return self._shared.popleft()
                    self._changed.wait()
                if self._closed:
                    return None
                self._health.recycled += 1
                self._vacate(place)
            self._renew(place)

    def _run(self, place: _Place, job: _Job) -> None:
        failure, value = None, None
        began = time.monotonic()
        try:
            if place.process is None:
                self._start(place)
                began = time.monotonic()
            assert place.process is not None
            value = place.process.call(job.ask, job.deadline_s)
        except CallFailed as error:
            failure = error
        with self._changed:
            if failure is None or failure.kind == "raised":
                self._health.calls += 1
                self._health.raised += failure is not None
                self._walls.append((time.monotonic() - began) * 1e3)
            elif self._closed:
                failure = CallFailed("closed", f"the processes of {self.name} were ended")
            elif failure.kind != "start":
                self._health.kills += failure.kind == "deadline"
                self._health.lost += failure.kind == "lost"
            broken = failure is not None and failure.kind in ("deadline", "lost")
            orphans = self._vacate(place) if broken else []
        if failure is None:
            job.future.set_result(value)
        else:
            _fail(job.future, failure)
        for orphan in orphans:
            _fail(orphan.future, CallFailed("lost", "the process of this seat was ended by a call of another"))
        if broken and failure is not None:
            first = self._health.kills + self._health.lost == 1
            log.log(logging.WARNING if first else logging.DEBUG, "%s: %s (others are counted)", self.name, failure)
            self._renew(place)

    def _vacate(self, place: _Place) -> list[_Job]:
        """Its seats are no more; what they waited for."""
        orphans = list(place.queue)
        place.queue.clear()
        place.generation += 1
        place.seats = place.used = 0
        return orphans

    def _renew(self, place: _Place) -> None:
        """Another process in the place of this one, at once: whoever comes next need not wait for it."""
        if place.process is not None:
            place.process.end()  # `close` finds it here until nothing of it is left
        place.process = None
        try:
            self._start(place)
        except CallFailed as error:
            log.error("%s: %s", self.name, error)
        self._seat_all()

    def _start(self, place: _Place) -> None:
        """Raises: CallFailed."""
        with self._changed:
            if self._closed:
                raise CallFailed("closed", f"the processes of {self.name} were ended")
            process = place.process = Process(self._hello, self._environment)
        try:
            process.ready(self.settings.start_s)
        except CallFailed as error:
            process.end()
            with self._changed:
                place.process = None
                self._failed_starts += 1
                if self._failed_starts >= _MAX_FAILED_STARTS:
                    self._no_start = str(error)
                    self._no_start_until = time.monotonic() + _PAUSE_S
            raise
        with self._changed:
            self._failed_starts, self._no_start = 0, ""
            self._health.starts += 1

    def _now(self) -> Health:
        health, walls = self._health, sorted(self._walls)
        if walls:
            health.p50_ms, health.p99_ms = round(walls[len(walls) // 2], 2), round(walls[len(walls) * 99 // 100], 2)
        health.alive = sum(place.process is not None for place in self._places)
        health.waiting = len(self._shared) + sum(len(place.queue) for place in self._places)
        health.seats = sum(place.seats for place in self._places)
        return replace(health)

    def _tell(self) -> None:
        """Now and then, if anything was called."""
        with self._changed:
            now = time.monotonic()
            if now - self._told_at < HEALTH_S or self._health.calls == self._told:
                return
            self._told_at, self._told = now, self._health.calls
            health = self._now()
        log.info("%s: %s", self.name, ", ".join(f"{k} {v:g}" for k, v in asdict(health).items()))


def _job(pool: ProcessPool, method: str, arguments: tuple[Any, ...], deadline_s: float | None) -> _Job:
    return _Job(Ask(method, arguments), pool.settings.deadline_s if deadline_s is None else deadline_s)


def _fail(future: Future[Any], error: CallFailed) -> None:
    """Unless nobody waits for it."""
    if future.running() or future.set_running_or_notify_cancel():
        future.set_exception(error)


def _environment(clean: bool) -> dict[str, str]:
    """Equal hashes in every process: an order of sets that a target depends on is the same one everywhere."""
    more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
    return {"PATH": os.defpath, "OMP_NUM_THREADS": "1", **more} if clean else child_environment(None, more)
