"""The worker processes of a node: started, watched, killed when they hang, started again.

A worker whose loop has not turned for `stall_s` while one of its episodes is past its deadline is killed; its episodes
fail (they are data), the node goes on. A worker that was left with too many threads nobody can stop gets no more
episodes and ends when its last one does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from astraflow.config.env import child_environment
from astraflow.errors import AstraFlowError, ConfigError
from astraflow.rollout.loop import in_thread
from astraflow.rollout.worker.channel import Ask, Cancel, Channel, Done, Drop, Hello, Message, Pulse, Ready, Start
from astraflow.types import EpisodeLease, Outcome

log = logging.getLogger("astraflow.node")


@dataclass(frozen=True)
class PoolLimits:
    """How long a worker may do what. Seconds."""

    pulse_s: float = 0.5
    stall_s: float = 5.0  # silence of a worker with an overdue episode before it is killed
    grace_s: float = 2.0  # past an episode's deadline before the node itself calls it over
    start_s: float = 120.0  # to build the workflow
    max_left_running: int = 16  # unstoppable threads before a worker is replaced
    max_failed_starts: int = 3  # in a row


class Player(Protocol):
    """One episode as the pool sees it."""

    key: str
    lease: EpisodeLease
    timeout_s: float

    def asked(self, ask: Ask, channel: Channel) -> None:
        """A call came; its Answer goes to `channel`."""

    def dropped(self, call: int) -> None:
        """The workflow no longer waits for this call."""

    def ended(self, outcome: Outcome | None, error: str | None, code: str = "") -> str | None:
        """It is over; `code`: version of the code that played it. Gives the error that it is kept with."""

    def given_back(self, *, lost: bool) -> None:
        """Nothing of it is kept, its lease goes back; `lost`: that counts towards workflow.max_attempts."""


class Pool(Protocol):
    """Who plays. Of each player that it took, exactly one of `ended` and `given_back` is called, once."""

    def takes(self, player: Player) -> bool:
        """It can take this player now."""

    def place(self, player: Player) -> int:
        """Play it; returns its slot. Only right after `takes`. Raises: WireError: its task cannot be sent."""

    def stop(self, slot: int) -> None:
        """It is not wanted any more; its end follows."""


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Channel
    born: float
    pulsed: float  # monotonic, when it was last heard of
    episodes: dict[int, tuple[Player, float]] = field(default_factory=dict)  # slot -> player, deadline
    left_running: int = 0
    ready: bool = False
    retiring: bool = False


class WorkerPool:
    """`num_workers` processes that play `hello`'s workflow; `on_ready` is called when one can take episodes (again)."""

    def __init__(
        self, num_workers: int, hello: Hello, on_ready: Callable[[], None], limits: PoolLimits | None = None
    ) -> None:
        self._num_workers, self._hello, self._on_ready = num_workers, hello, on_ready
        self._limits = limits or PoolLimits()
        self._workers: list[_Worker] = []
        self._homes: dict[int, _Worker] = {}  # slot -> worker
        self._gone: list[subprocess.Popen[bytes]] = []  # not yet reaped
        self._next_slot = 0
        self._failed_starts = 0
        self._closing = False
        self._changed = asyncio.Event()
        self._problem: AstraFlowError | None = None
        self.num_restarts = 0

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
            self._gone = [process for process in self._gone if process.poll() is None]
            await self._refill()

    async def _refill(self) -> None:
        """In the place of workers that are gone, also of one that was killed before it was ready."""
        while not self._closing and sum(not w.retiring for w in self._workers) < self._num_workers:
            self.num_restarts += 1
            await self._spawn()

    @property
    def num_ready(self) -> int:
        """Workers that can take an episode now."""
        return sum(w.ready and not w.retiring for w in self._workers)

    def takes(self, player: Player) -> bool:
        """Some worker is ready."""
        return self.num_ready > 0

    def place(self, player: Player) -> int:
        """Start an episode on the worker with the fewest; returns its slot. Only while `num_ready` > 0.

        Raises: WireError: its task cannot be sent.
        """
        able = [w for w in self._workers if w.ready and not w.retiring]
        worker = min(able, key=lambda w: len(w.episodes)) if len(able) > 1 else able[0]
        self._next_slot += 1
        slot = self._next_slot
        worker.channel.send(Start(slot, player.key, player.lease.task, player.timeout_s))
        worker.episodes[slot] = (player, time.monotonic() + player.timeout_s)
        self._homes[slot] = worker
        return slot

    def stop(self, slot: int) -> None:
        """Ask the worker to stop an episode; `ended` follows."""
        if (worker := self._homes.get(slot)) is not None:
            worker.channel.send(Cancel(slot))

    async def close(self) -> None:
        """Hang up: workers end by themselves; one that does not is killed."""
        self._closing = True
        processes = [worker.process for worker in self._workers] + self._gone
        for worker in list(self._workers):
            worker.channel.close()
        await in_thread(lambda: _end(processes), "workers")

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = _start_process(theirs.fileno())
        channel = Channel(lambda m: self._on_message(worker, m), lambda: self._on_lost(worker))
        now = time.monotonic()
        worker = _Worker(process, channel, now, now)
        self._workers.append(worker)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        channel.send(self._hello)

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
                self._end(worker, message.slot, message.outcome, message.error)
            case Ready():
                self._on_built(worker, message)
            case Pulse():
                pass
            case _:
                raise AssertionError(f"a node is never sent {type(message).__name__}")

    def _on_built(self, worker: _Worker, message: Ready) -> None:
        self._changed.set()
        if message.problem is not None:
            known = ConfigError("workflow", [message.problem]) if message.settings else None
            self._problem = known or AstraFlowError(message.problem)
            return
        worker.ready = True
        self._failed_starts = 0
        self._on_ready()

    def _end(self, worker: _Worker, slot: int, outcome: Outcome | None, error: str | None) -> None:
        entry = worker.episodes.pop(slot, None)
        self._homes.pop(slot, None)
        if entry is not None:
            entry[0].ended(outcome, error)

    def _on_lost(self, worker: _Worker) -> None:
        """The channel ended: the process is gone or about to go; its episodes end with it."""
        self._workers.remove(worker)
        self._gone.append(worker.process)
        self._changed.set()
        if self._closing:
            pass
        elif not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= self._limits.max_failed_starts:
                self._problem = AstraFlowError(
                    f"workers={self._failed_starts} in a row ended before they were ready; see the log above for why"
                )
        else:
            log.warning("worker %d is gone; its %d episodes fail", worker.process.pid, len(worker.episodes))
        now = time.monotonic()
        for slot, (_, deadline) in list(worker.episodes.items()):
            late = now >= deadline
            error = "timeout: the worker hung and was killed" if late else "worker_killed: its worker process ended"
            self._end(worker, slot, None, error)
        worker.process.kill()

    def _check(self, worker: _Worker, now: float) -> None:
        if not worker.ready:
            if now - worker.born > self._limits.start_s:
                self._problem = self._slow_start()
            return
        overdue = [slot for slot, (_, deadline) in worker.episodes.items() if now > deadline]
        if overdue and now - worker.pulsed > self._limits.stall_s:
            log.error("worker %d has not turned its loop for %.1f s; killed", worker.process.pid, now - worker.pulsed)
            worker.process.kill()  # the end of its channel settles its episodes
            return
        for slot in overdue:
            player, deadline = worker.episodes[slot]
            if now > deadline + self._limits.grace_s and now - worker.pulsed < self._limits.stall_s:
                worker.left_running += 1
                worker.channel.send(Cancel(slot))
                self._end(worker, slot, None, f"timeout: the episode ran longer than {player.timeout_s:.3g} s")
        if worker.left_running >= self._limits.max_left_running and not worker.retiring:
            log.warning("worker %d is left with %d stuck episodes; replaced", worker.process.pid, worker.left_running)
            worker.retiring = True
        if worker.retiring and not worker.episodes:
            worker.channel.close()

    def _slow_start(self) -> AstraFlowError:
        return AstraFlowError(
            f"workflow.type={self._hello.workflow!r} was not built in {self._limits.start_s:.0f} s; "
            "make its construction faster"
        )


def _start_process(fd: int) -> subprocess.Popen[bytes]:
    """A worker that speaks on the socket `fd`. It finds what this process can import, and does not get the token."""
    environment = child_environment(None, {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    command = [sys.executable, "-m", "astraflow.rollout.worker", str(fd)]
    return subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, env=environment)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
