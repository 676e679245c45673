"""`astraflow worker`: a client of a door that plays a workflow in worker processes, as a node plays its own.

door ─leases─► plays ─► worker processes (your workflow) ─calls─► door's gateway
  ▲                        └── outcome or error ──► finish / fail, with the version of the code
  └── heartbeats; told to leave: no more leases, what is in play ends, the rest is given back

The door may be away for `give_up_s` (its node starts again): what was in play then is lost and played by others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from astraflow.errors import AstraFlowError, WireError
from astraflow.launch.remote.calls import Calls, Forwarded
from astraflow.observe.logs import setup_logging
from astraflow.observe.process import settle_memory
from astraflow.rollout.loop import Guarded, in_thread, run_loop
from astraflow.rollout.pool import PoolLimits, WorkerPool
from astraflow.rollout.worker.channel import Hello
from astraflow.swarm import Lost, Play, RunOver, Swarm
from astraflow.types import Outcome, error_kind
from astraflow.wire.client import HttpClient
from astraflow.wire.patience import FIRST_ANSWER_S, GONE_S, ask_patiently
from astraflow.wire.swarm.messages import SwarmStatus

log = logging.getLogger("astraflow.worker")
_POLL_S = 20.0


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """One `astraflow worker`. Seconds."""

    url: str  # of the door
    workflow: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of the workflow
    token: str | None = None
    name: str = ""
    sources: tuple[str, ...] = ()  # whose episodes it plays; empty: all
    concurrency: int = 16  # episodes played at once
    workers: int = 1
    watch: bool = False
    max_output_bytes: int = 1 << 20
    limits: PoolLimits = field(default_factory=PoolLimits)
    give_up_s: float = GONE_S
    drain_s: float = 10.0  # to finish what is in play when told to leave; the rest is given back


def run_worker(options: RemoteOptions) -> None:
    """A worker as a process of its own, until the run is over or SIGTERM."""
    setup_logging(options.name or "worker", secrets=(options.token,))
    run_loop(serve_worker(options, signals=(signal.SIGTERM, signal.SIGINT)))


async def serve_worker(options: RemoteOptions, *, signals: tuple[signal.Signals, ...] = ()) -> None:
    """Returns when the run is over, or after one of `signals` once everything was handed in or given back.

    Raises: Unreachable: the door was away for `give_up_s`. AstraFlowError: the workflow cannot be built.
    """
    loop = asyncio.get_running_loop()
    worker = _Remote(options)
    for number in signals:
        loop.add_signal_handler(number, worker.leave, number.name)
    try:
        await worker.tasks.run(worker.live(), worker.over)
    finally:
        await worker.close()
        for number in signals:
            loop.remove_signal_handler(number)


async def policies_of(url: str, token: str | None) -> list[str]:
    """What the door serves. Raises: Unreachable, Unauthorized, WireError: it does not answer as a door."""
    never = threading.Event()
    with contextlib.closing(HttpClient(url, token, give_up_s=0.0)) as client:

        def ask() -> SwarmStatus:
            return client.json("GET", "/swarm/status", None, SwarmStatus)

        status = await in_thread(lambda: ask_patiently(ask, never, FIRST_ANSWER_S, "the swarm door"), "door")
    return status.policies


class _Playing(Forwarded):
    """One episode."""

    def __init__(self, owner: _Remote, calls: Calls, play: Play) -> None:
        super().__init__(calls, play)
        self._owner, self.play, self.slot = owner, play, -1

    def ended(self, outcome: Outcome | None, error: str | None, code: str = "") -> str | None:
        self._owner.end(self, outcome, error, code)
        return error

    def given_back(self, *, lost: bool) -> None:
        self._owner.end(self, None, None, "")


class _Remote:
    """One life of a worker."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._calls = Calls(options.url)
        self._swarm = Swarm(
            options.url, options.token, name=options.name, sources=options.sources, give_up_s=options.give_up_s
        )
        self._pool: WorkerPool | None = None
        self._plays: set[_Playing] = set()
        self._waiting: list[_Playing] = []  # those of them that no worker process took yet
        self._reports: set[asyncio.Task[None]] = set()
        self._leaving, self._changed = asyncio.Event(), asyncio.Event()
        self._endings: Counter[str] = Counter()
        self.over = asyncio.Event()
        self.tasks = Guarded("the worker")

    def leave(self, why: str) -> None:
        """Finish or give back what is in play, then go; asked a second time, or before it plays: go at once."""
        log.info("%s: leaving", why)
        (self.over if self._leaving.is_set() or self._pool is None else self._leaving).set()

    async def live(self) -> None:
        """Build the workflow, play until the run is over or told to leave."""
        options = self._options
        policies = await policies_of(options.url, options.token)
        hello = Hello(
            options.workflow, dict(options.options), policies, f"{options.url.rstrip('/')}/v1", options.limits.pulse_s,
            max_output_bytes=options.max_output_bytes,
        )  # fmt: skip
        pool = WorkerPool(options.workers, hello, self._start_waiting, options.limits, watch=options.watch)
        self._pool = pool
        await pool.start()
        self._swarm.code = pool.code
        self.tasks.spawn("worker pool", pool.watch())
        self.tasks.spawn("watch", self._watch(pool))
        leases = self.tasks.spawn("leases", self._leases())
        settle_memory()
        log.info("playing %s, code %s, up to %d episodes at once", options.workflow, pool.code, options.concurrency)
        await self._leaving.wait()
        leases.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.drain_s):
                while self._plays or self._reports:
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Give back what is left and end every part."""
        await in_thread(self._swarm.close, "goodbye")
        if self._pool is not None:
            await self._pool.close()
        self._calls.close()
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(self._endings.items()))
        log.info("left: %s", endings or "nothing was played")

    async def _leases(self) -> None:
        """Ends when the run is over, or nothing more is wanted of us."""
        most = self._options.concurrency
        while True:
            while most - len(self._plays) < max(1, most // 8):
                self._changed.clear()
                await self._changed.wait()
            count = most - len(self._plays)
            try:
                plays = await in_thread(lambda: self._swarm.leases(count, _POLL_S), "leases")  # noqa: B023
            except RunOver:
                log.info("the run is over")
                self._leaving.set()
                return
            new = [_Playing(self, self._calls, play) for play in plays]
            self._plays.update(new)
            self._waiting += new
            self._start_waiting()

    def _start_waiting(self) -> None:
        pool = self._pool
        while pool is not None and self._waiting and pool.num_ready:
            playing = self._waiting.pop(0)
            try:
                playing.slot = pool.place(playing)
            except WireError as error:
                self.end(playing, None, f"task: {error}", pool.code)

    async def _watch(self, pool: WorkerPool) -> None:
        """What is not wanted any more is stopped; what no process took in time fails."""
        while True:
            await asyncio.sleep(self._options.limits.pulse_s)
            self._swarm.code = pool.code
            now = asyncio.get_running_loop().time()
            for playing in [p for p in self._plays if p.play.cancelled]:
                if playing.slot >= 0:
                    pool.stop(playing.slot)
                else:
                    self._waiting.remove(playing)
                    self.end(playing, None, None, "")
            for playing in [p for p in self._waiting if now > p.until]:
                self._waiting.remove(playing)
                self.end(playing, None, f"worker_killed: no worker process in {playing.timeout_s:.3g} s", pool.code)

    def end(self, playing: _Playing, outcome: Outcome | None, error: str | None, code: str) -> None:
        """The episode is over here: hand it in, unless the run does not want it any more. Once per play."""
        self._plays.discard(playing)
        playing.hang_up()
        self._changed.set()
        if playing.play.cancelled or (outcome is None and error is None):
            self._endings["cancelled"] += 1
            return
        report = self.tasks.spawn("report", self._report(playing.play, outcome, error, code))
        self._reports.add(report)
        report.add_done_callback(self._reported)

    def _reported(self, report: asyncio.Task[None]) -> None:
        self._reports.discard(report)
        self._changed.set()

    async def _report(self, play: Play, outcome: Outcome | None, error: str | None, code: str) -> None:
        try:
            if outcome is not None and error is None:
                error = await in_thread(lambda: _finish(play, outcome, code), "finish")
            else:
                await in_thread(lambda: play.fail(error or "", code=code), "fail")
        except Lost as problem:
            log.info("%s: %s", play.episode_id, problem)
            error = "lost: "
        except RunOver:
            error = "over: "
        kind = "done" if error is None else error_kind(error)
        if error is not None and kind not in (*self._endings, "lost", "over"):
            log.warning("%s failed: %s (others of this kind are counted only)", play.episode_id, error)
        self._endings[kind] += 1


def _finish(play: Play, outcome: Outcome, code: str) -> str | None:
    """Hand it in; the error that it is kept with, if any. A reward that the door refuses is the episode's error."""
    try:
        return play.finish(outcome, code=code)
    except (Lost, RunOver):
        raise
    except WireError as refusal:
        if refusal.status != 422:
            raise
        error = f"reward: {refusal}"
    except AstraFlowError as problem:
        error = str(problem)
    play.fail(error, code=code)
    return error
