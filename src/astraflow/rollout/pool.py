"""The worker processes of a node: started, watched, killed when they hang, started again, replaced by edited code.

| a worker that                                           | is                 | its episodes                         |
|---------------------------------------------------------|--------------------|--------------------------------------|
| has not turned its loop for `stall_s`, one is overdue   | killed             | fail: timeout, worker_killed         |
| uses too much memory, too many processes, floods a pipe | killed             | fail: memory, processes, output      |
| ends by itself                                          | replaced           | fail: worker_killed                  |
| is left with too many threads that nobody can stop      | replaced           | are played to their end              |
| uses much memory, or plays code that was edited since   | replaced           | are played to their end              |

Failed episodes are data; the node goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from astraflow.errors import AstraFlowError, ConfigError
from astraflow.rollout.loop import in_thread
from astraflow.rollout.players import Player
from astraflow.rollout.worker.channel import (
    Ask,
    Cancel,
    Done,
    Drop,
    Hello,
    Loaded,
    Message,
    Pulse,
    Ready,
    Start,
)
from astraflow.rollout.worker.edits import Edits
from astraflow.rollout.worker.process import Generation, WorkerProcess, end_all, start_worker
from astraflow.rollout.worker.usage import own_bytes, usage_of
from astraflow.types import Outcome

log = logging.getLogger("astraflow.node")
_NEARLY = 0.8  # of the memory that a worker may use: it gets no more episodes
_LAST_WORDS_S = 0.5
_APART = 20.0  # looks at all processes of this machine take a twentieth of a core at most, however many there are


@dataclass(frozen=True)
class PoolLimits:
    """What a worker may do how long (seconds), and how much of it."""

    pulse_s: float = 0.5
    stall_s: float = 5.0  # silence of a worker with an overdue episode before it is killed
    grace_s: float = 2.0  # past an episode's deadline before the node itself calls it over
    start_s: float = 120.0  # to build the workflow
    max_left_running: int = 16  # unstoppable threads before a worker is replaced
    max_failed_starts: int = 3  # in a row
    memory_bytes: int = 8 << 30  # of a worker and what it started; measured, so more is used for a moment. Linux
    max_processes: int = 1024  # that a worker and what it started may be. Linux
    max_output_per_s: int = 32 << 20  # bytes on standard output and error, of all that is not written by Python code


_Worker = WorkerProcess[Player]


class WorkerPool:
    """`num_workers` processes that play `hello`'s workflow; `on_ready` is called when one can take episodes (again).

    All play the same code: that of the first worker that was ready, whatever the files say later. With `watch` edited
    files are tried by a process of their own: if it works, workers with the new code take the new episodes and the old
    ones end with their last; if not, the old code goes on, and `notes` says why.
    """

    def __init__(
        self,
        num_workers: int,
        hello: Hello,
        on_ready: Callable[[], None],
        limits: PoolLimits | None = None,
        *,
        watch: bool = False,
    ) -> None:
        self._num_workers, self._hello, self._on_ready = num_workers, hello, on_ready
        self._limits = limits or PoolLimits()
        self._workers: list[_Worker] = []
        self._homes: dict[int, _Worker] = {}  # slot -> worker
        self._gone: list[_Worker] = []  # not yet reaped
        self._starting: set[asyncio.Task[_Worker]] = set()
        self._next_slot = 0
        self._failed_starts = 0
        self._closing = False
        self._changed = asyncio.Event()
        self._problem: AstraFlowError | None = None
        self._current = Generation()
        self._edits = Edits() if watch else None
        self._trial: _Worker | None = None
        self._refused_edit = ""
        self._usage_due = 0.0
        self.num_restarts = self.num_edits = self.num_refused_edits = 0

    async def start(self) -> None:
        """Returns when every worker has built the workflow. Raises: AstraFlowError: one could not, or not in time."""
        for _ in range(self._num_workers):
            await self._spawn()
        try:
            async with asyncio.timeout(self._limits.start_s):
                while self.num_ready < self._num_workers and self._problem is None:
                    self._changed.clear()
                    await self._refill()
                    await self._changed.wait()
        except TimeoutError:
            raise self._slow_start() from None
        if self._problem is not None:
            raise self._problem

    async def watch(self) -> None:
        """Background task. Raises: AstraFlowError: workers cannot be started."""
        while True:
            await asyncio.sleep(self._limits.pulse_s)
            if self._problem is not None:
                raise self._problem
            now = time.monotonic()
            for worker in list(self._workers):
                self._check(worker, now)
            self._reap()
            await self._refill()
            await self._check_usage()
            if self._edits is not None and self._trial is None and await self._edits.found():
                log.info("the workflow was edited: trying the new code")
                self._trial = await self._spawn(trial=True)

    async def _refill(self) -> None:
        """In the place of workers that are gone, also of one that was killed before it was ready."""
        while not self._closing and sum(not w.retiring and not w.trial for w in self._workers) < self._num_workers:
            self.num_restarts += 1
            await self._spawn()

    @property
    def num_ready(self) -> int:
        """Workers that can take an episode now."""
        return sum(w.able for w in self._workers)

    @property
    def code(self) -> str:
        """Version of the code that new episodes are played with; "": no worker was ready yet."""
        return self._current.code

    def notes(self) -> dict[str, str]:
        """For people: the version of the code, and why the newest edit is not played."""
        return {"code": self.code} | ({"edit": self._refused_edit} if self._refused_edit else {})

    def takes(self, player: Player) -> bool:
        """Some worker is ready."""
        return self.num_ready > 0

    def place(self, player: Player) -> int:
        """Start an episode on the worker with the fewest; returns its slot. Only while `num_ready` > 0.

        Raises: WireError: its task cannot be sent.
        """
        worker = min((w for w in self._workers if w.able), key=lambda w: len(w.episodes))
        self._next_slot += 1
        slot = self._next_slot
        worker.channel.send(Start(slot, player.key, player.lease.task, player.timeout_s))
        worker.episodes[slot] = (player, time.monotonic() + player.timeout_s, "")
        self._homes[slot] = worker
        return slot

    def stop(self, slot: int) -> None:
        """Ask the worker to stop an episode; `ended` follows."""
        if (worker := self._homes.get(slot)) is not None:
            worker.channel.send(Cancel(slot))

    def fail(self, slot: int, error: str) -> None:
        """As if its deadline had come, but for the error."""
        if (worker := self._homes.get(slot)) is not None:
            player, deadline, _ = worker.episodes[slot]
            worker.episodes[slot] = (player, min(deadline, time.monotonic()), error)
            worker.channel.send(Cancel(slot))

    async def close(self) -> None:
        """Hang up: workers end by themselves; one that does not is killed."""
        self._closing = True
        if self._starting:
            await asyncio.wait(self._starting)
        workers = self._workers + self._gone
        for worker in list(self._workers):
            worker.channel.close()
        await in_thread(lambda: end_all([w.process for w in workers]), "workers")
        with suppress(TimeoutError):  # of what they wrote, nothing is lost
            async with asyncio.timeout(_LAST_WORDS_S):
                for worker in workers:
                    await worker.drain.ended.wait()
        for worker in workers:
            worker.drain.close()

    async def _spawn(self, *, trial: bool = False) -> _Worker:
        """A new worker. Whoever waits here may be cancelled: the process is known all the same, and `close` ends it."""
        starting = asyncio.create_task(self._start_worker(trial))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        return await asyncio.shield(starting)

    async def _start_worker(self, trial: bool) -> _Worker:
        """From the files as they are now while no code is known, and for a trial; else from what is remembered."""
        generation = Generation() if trial else self._current if self._current.code else Generation()
        hello = replace(self._hello, files=list(generation.files.values()))
        worker = await start_worker(
            hello, generation, trial, self._limits.max_output_per_s, self._on_message, self._on_lost
        )
        self._workers.append(worker)
        return worker

    def _on_message(self, worker: _Worker, message: Message) -> None:
        worker.pulsed = time.monotonic()
        match message:
            case Ask():
                if (entry := worker.episodes.get(message.slot)) is not None:
                    entry[0].asked(message, worker.channel)
            case Drop():
                if (entry := worker.episodes.get(message.slot)) is not None:
                    entry[0].dropped(message.call)
            case Done():
                worker.left_running += message.left_running
                worker.generation.code = message.code  # an episode may have imported more of it
                self._end(worker, message.slot, message.outcome, message.error)
            case Loaded():
                for file in message.files:
                    worker.generation.files.setdefault(file.module, file)
                if self._edits is not None and worker.generation is self._current:
                    self._edits.add(message.files)
            case Ready():
                self._on_built(worker, message)
            case Pulse():
                pass
            case _:
                raise AssertionError(f"a node is never sent {type(message).__name__}")

    def _on_built(self, worker: _Worker, message: Ready) -> None:
        self._changed.set()
        if message.problem is not None and worker.trial:
            self._refuse(message.problem, message.trace)
            return
        if message.problem is not None:
            log.error("workflow %s could not be built\n%s", self._hello.workflow, message.trace)
            known = ConfigError("workflow", [message.problem]) if message.settings else None
            self._problem = known or AstraFlowError(message.problem)
            return
        worker.generation.code = message.code
        if worker.trial:
            self._adopt(worker)
        elif not self._current.code:
            self._take(worker.generation)
        elif worker.generation is not self._current:  # it was started beside the first one
            if message.code != self._current.code:  # and the files were edited between
                worker.retiring = True
                worker.channel.close()
                return
            worker.generation = self._current
        worker.ready = True
        self._failed_starts = 0
        self._on_ready()

    def _take(self, generation: Generation) -> None:
        self._current = generation
        if self._edits is not None:
            self._edits.replace(generation.files.values())

    def _adopt(self, trial: _Worker) -> None:
        """New episodes go to the new code; workers with the old one end with their last episode."""
        log.info("edited workflow: code %s takes the place of %s", trial.generation.code, self._current.code)
        for worker in self._workers:
            worker.retiring = worker.retiring or worker is not trial
        self._take(trial.generation)
        trial.trial, self._trial, self._refused_edit = False, None, ""
        self.num_edits += 1

    def _refuse(self, problem: str, trace: str) -> None:
        """The edit does not work: it is told, and the old code goes on."""
        trial, self._trial = self._trial, None
        assert trial is not None and self._edits is not None
        self._edits.refused(trial.generation.files.values())
        self.num_refused_edits += 1
        self._refused_edit = f"{problem}\n{trace}".strip()
        log.error("the edited workflow does not work, code %s goes on: %s", self._current.code, self._refused_edit)
        trial.retiring = True
        trial.kill()

    def _end(self, worker: _Worker, slot: int, outcome: Outcome | None, error: str | None) -> None:
        entry = worker.episodes.pop(slot, None)
        self._homes.pop(slot, None)
        if entry is not None:
            player, _, failed = entry
            player.ended(None if failed else outcome, failed or error, worker.generation.code)

    def _on_lost(self, worker: _Worker) -> None:
        """The channel ended: the process is gone or about to go; its episodes end with it."""
        self._workers.remove(worker)
        self._gone.append(worker)
        self._changed.set()
        if self._closing or worker.retiring:
            pass
        elif worker is self._trial:
            self._refuse("its process ended before it was ready", "")
        elif not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= self._limits.max_failed_starts:
                self._problem = AstraFlowError(
                    f"workers={self._failed_starts} in a row ended before they were ready; see the log above for why"
                )
        else:
            why = worker.why or "it ended"
            log.warning("worker %d is gone (%s); its %d episodes fail", worker.process.pid, why, len(worker.episodes))
        now = time.monotonic()
        for slot, (_, deadline, _) in list(worker.episodes.items()):
            late = now >= deadline
            error = "timeout: the worker hung and was killed" if late else "worker_killed: its worker process ended"
            self._end(worker, slot, None, worker.why or error)
        worker.kill()

    def _check(self, worker: _Worker, now: float) -> None:
        if worker.process.poll() is not None:  # what it started may still hold its channel
            worker.channel.close()
            return
        worker.drain.tell()
        if not worker.ready:
            if now - worker.born > self._limits.start_s and worker is self._trial:
                self._refuse(str(self._slow_start()), "")
            elif now - worker.born > self._limits.start_s:
                self._problem = self._slow_start()
            return
        overdue = [slot for slot, (_, deadline, _) in worker.episodes.items() if now > deadline]
        if overdue and now - worker.pulsed > self._limits.stall_s:
            late = ", ".join(worker.episodes[slot][0].lease.episode_id for slot in overdue)
            log.error(
                "worker %d has not turned its loop for %.1f s, and %s is overdue: its code blocks; killed",
                worker.process.pid, now - worker.pulsed, late,
            )  # fmt: skip
            worker.kill()
            return
        for slot in overdue:
            player, deadline, _ = worker.episodes[slot]
            if now > deadline + self._limits.grace_s and now - worker.pulsed < self._limits.stall_s:
                worker.left_running += 1
                worker.channel.send(Cancel(slot))
                self._end(worker, slot, None, f"timeout: the episode ran longer than {player.timeout_s:.3g} s")
        if worker.left_running >= self._limits.max_left_running and not worker.retiring:
            log.warning("worker %d is left with %d stuck episodes; replaced", worker.process.pid, worker.left_running)
            worker.retiring = True
        if worker.retiring and not worker.episodes:
            worker.channel.close()

    async def _check_usage(self) -> None:
        """Memory and number of processes, those that user code started included."""
        limits, workers, began = self._limits, {w.process.pid: w for w in self._workers}, time.monotonic()
        if began < self._usage_due:
            return
        found = await in_thread(lambda: usage_of(workers), "usage")
        self._usage_due = began + _APART * (time.monotonic() - began)
        for pid, usage in found.items():
            worker = workers[pid]
            if len(usage.pids) > limits.max_processes:
                worker.kill(f"processes: its worker process and what it started are more than {limits.max_processes}")
            if usage.resident_bytes <= _NEARLY * limits.memory_bytes:
                continue
            used = await in_thread(lambda: own_bytes(usage), "usage")  # noqa: B023
            if used > limits.memory_bytes:
                worker.kill(
                    f"memory: its worker process used {used} bytes, more than {limits.memory_bytes}; "
                    "raise worker_memory_bytes of its node"
                )
            elif used > _NEARLY * limits.memory_bytes and not worker.retiring:
                log.warning("worker %d uses %d bytes; replaced when its episodes have ended", pid, used)
                worker.retiring = True

    def _reap(self) -> None:
        left = []
        for worker in self._gone:
            if worker.reaped:
                worker.drain.close()
                continue
            worker.reaped = worker.process.poll() is not None
            left.append(worker)
        self._gone = left

    def _slow_start(self) -> AstraFlowError:
        return AstraFlowError(
            f"workflow.type={self._hello.workflow!r} was not built in {self._limits.start_s:.0f} s; "
            "make its construction faster"
        )
