"""Plays leases: an episode waits for its weights, is played by a worker, becomes an Episode, and goes to the committer.

| an episode is | until                                             | then                                        |
|---------------|---------------------------------------------------|---------------------------------------------|
| waiting       | every policy's engine has the lease's min version | a gateway episode is opened, a worker plays |
|               | (and the newest one, if that comes soon)          |                                             |
| playing       | Done, deadline, cancel, or the end of its worker  | its captured calls become trajectories      |
| finished      | `on_episode(episode)` was called                  | its place is free                           |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from astraflow.contracts import Engine
from astraflow.errors import AstraFlowError, EpisodeError, WireError
from astraflow.rollout.context.credit import rewarded
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import failure
from astraflow.rollout.gateway.episode import EpisodeCapture
from astraflow.rollout.players import Player, Pool
from astraflow.rollout.worker.channel import Answer, Ask, Channel
from astraflow.types import Episode, EpisodeLease, Outcome, Trajectory, error_kind

log = logging.getLogger("astraflow.node")

_MARGIN_S = 1.0  # of a lease's time is kept for sending what was played (at most a tenth of it)


@dataclass(frozen=True)
class RunnerOptions:
    """What a runner needs to know beside its parts."""

    node_id: str
    capacity: int  # episodes in play at once, at first
    delay_s: float = 0.0  # added to every call of a workflow
    max_tokens: int | None = None  # of an episode that is handed in; None: any number
    patience_s: float = 0.5  # an episode waits so long for the newest weights: what starts fresh is rarely dropped
    step_timeout_s: float = 0.0  # an episode that makes no call for so long fails; 0: none does
    park_s: float | None = None  # an episode that nobody takes goes back after so long; None: it waits to its deadline


def _keep(lease: EpisodeLease, lost: bool) -> None:
    """Nobody else plays."""


class _Play:
    """One lease in play. The pool sees it as a `Player`."""

    __slots__ = ("_runner", "able", "calls", "deadline", "key", "lease", "received", "slot", "timeout_s", "wanted")

    def __init__(self, runner: Runner, lease: EpisodeLease, now: float) -> None:
        self._runner = runner
        self.lease = lease
        self.received = now  # monotonic
        self.able = 0.0  # monotonic, since when it only waits for somebody who plays it; 0: it waits for weights
        self.timeout_s = lease.timeout_s - min(_MARGIN_S, 0.1 * lease.timeout_s)
        self.deadline = now + self.timeout_s
        self.key = ""  # of the gateway; empty while waiting
        self.slot = -1
        self.wanted = True  # False: the lease was taken away, nothing is committed
        self.calls: dict[int, asyncio.Task[None]] = {}

    def asked(self, ask: Ask, channel: Channel) -> None:
        self.calls[ask.call] = self._runner.loop.create_task(self._runner.serve(self, ask, channel))

    def dropped(self, call: int) -> None:
        if (task := self.calls.get(call)) is not None:
            task.cancel()

    def ended(self, outcome: Outcome | None, error: str | None, code: str = "") -> str | None:
        return self._runner.end(self, outcome, error, code)

    def given_back(self, *, lost: bool) -> None:
        self._runner.give_back(self, lost=lost)


class Runner:
    """Keeps up to `capacity` episodes in play. All methods run on one loop."""

    def __init__(
        self,
        options: RunnerOptions,
        gateway: Gateway,
        engines: Mapping[str, Engine],
        pool: Pool,
        on_episode: Callable[[Episode], None],
        newest: Callable[[str], int] = lambda policy: -1,
        on_given_back: Callable[[EpisodeLease, bool], None] = _keep,
    ) -> None:
        """`newest(policy)`: the newest version that was announced to this node. `on_given_back(lease, lost)`: it must
        be offered to others."""
        self.loop = asyncio.get_running_loop()
        self._options, self._gateway, self._engines, self._pool = options, gateway, engines, pool
        self._on_episode, self._newest, self._on_given_back = on_episode, newest, on_given_back
        self.capacity = options.capacity
        self._plays: dict[str, _Play] = {}  # by episode_id
        self._waiting: dict[str, _Play] = {}  # the part of them that has not started
        self._freed = asyncio.Event()
        self.endings: Counter[str] = Counter()  # "done", "cancelled", or the kind of error -> episodes

    def accept(self, leases: Iterable[EpisodeLease]) -> None:
        """Play these. A lease that is in play already is taken once; a newer attempt replaces an older one."""
        now = time.monotonic()
        for lease in leases:
            known = self._plays.get(lease.episode_id)
            if known is not None:
                if known.lease.attempt >= lease.attempt:
                    continue
                self._abandon(known)
            play = _Play(self, lease, now)
            self._plays[lease.episode_id] = self._waiting[lease.episode_id] = play
        self.start_waiting()

    def start_waiting(self) -> None:
        """Start what can start: call it when weights came into force or a worker is ready, and now and then."""
        if not self._waiting:
            return
        versions = {policy: engine.version for policy, engine in self._engines.items()}
        fresh = all(version >= self._newest(policy) for policy, version in versions.items())
        now, park_s = time.monotonic(), self._options.park_s
        patient_since = now - self._options.patience_s
        for play in list(self._waiting.values()):
            if (fresh or play.received <= patient_since) and all(
                versions.get(p, -1) >= v for p, v in play.lease.min_versions.items()
            ):
                play.able = play.able or now
                if self._pool.takes(play):
                    self._start(play)
                elif park_s is not None and now - play.able > park_s:
                    self.give_back(play, lost=False)

    async def keep_deadlines(self, period_s: float) -> None:
        """Forever: every `period_s` start what can start and give up on what waited too long."""
        while True:
            await asyncio.sleep(min(period_s, self._options.patience_s))
            self.start_waiting()
            self._expire_waiting()
            self._fail_idle()

    def _expire_waiting(self) -> None:
        """Give up on episodes whose weights (or worker) did not come in time: they fail, as data."""
        now = time.monotonic()
        for play in [p for p in self._waiting.values() if now > p.deadline]:
            engines = self._engines
            late = [p for p, v in play.lease.min_versions.items() if p not in engines or engines[p].version < v]
            what = f"weights: of {', '.join(late)}" if late else "worker_killed: a worker process"
            self.end(play, None, f"{what} did not come in {play.timeout_s:.3g} s")

    def _fail_idle(self) -> None:
        limit_s = self._options.step_timeout_s
        for play in list(self._plays.values()) if limit_s else ():
            if play.slot >= 0 and self._gateway.idle_s(play.key) > limit_s:
                error = f"step_timeout: the workflow made no call for {limit_s:.3g} s; see workflow.step_timeout_s"
                self._pool.fail(play.slot, error)

    def cancel(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Stop playing these (episode id, attempt) whose lease is no longer ours; nothing of them is committed. A later
        attempt goes on."""
        for episode_id, attempt in attempts:
            if (play := self._plays.get(episode_id)) is not None and play.lease.attempt <= attempt:
                self._abandon(play)

    def cancel_all(self) -> None:
        """Stop everything; nothing of it is committed."""
        for play in list(self._plays.values()):
            self._abandon(play)

    def playing(self) -> list[tuple[str, int]]:
        """(episode id, attempt) of all that waits or plays."""
        return [(play.lease.episode_id, play.lease.attempt) for play in self._plays.values()]

    @property
    def num_in_play(self) -> int:
        """Episodes waiting or playing."""
        return len(self._plays)

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for weights or for a worker."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Player]:
        """Those episodes."""
        return list(self._waiting.values())

    def parked(self, for_s: float) -> Counter[str]:
        """Source -> episodes that could have started so long ago, and that nobody takes."""
        since = time.monotonic() - for_s
        return Counter(p.lease.task.source for p in self._waiting.values() if 0.0 < p.able <= since)

    @property
    def free(self) -> int:
        """Episodes that may be leased now."""
        return max(0, self.capacity - len(self._plays))

    def resize(self, capacity: int) -> None:
        """From now on so many episodes may be in play; those that are go on."""
        self.capacity = capacity
        self._freed.set()

    async def room(self, share: int) -> int:
        """Waits until one place in `share` is free (at least one); gives how many are."""
        while self.free < max(1, self.capacity // share):
            self._freed.clear()
            await self._freed.wait()
        return self.free

    async def emptied(self) -> None:
        """Waits until nothing is in play."""
        while self._plays:
            self._freed.clear()
            await self._freed.wait()

    def _start(self, play: _Play) -> None:
        del self._waiting[play.lease.episode_id]
        play.timeout_s = max(0.001, play.deadline - time.monotonic())
        play.key = self._gateway.open_episode(play.lease)
        try:
            play.slot = self._pool.place(play)
        except WireError as error:
            self.end(play, None, f"task: {error}")

    def _abandon(self, play: _Play) -> None:
        play.wanted = False
        if play.slot < 0:
            self.end(play, None, None)
            return
        self._plays.pop(play.lease.episode_id)
        self._pool.stop(play.slot)
        self._freed.set()

    async def serve(self, play: _Play, ask: Ask, channel: Channel) -> None:
        """One call of a workflow: the same JSON and the same function of the gateway as over HTTP."""
        try:
            if self._options.delay_s:
                await asyncio.sleep(self._options.delay_s)
            status, body = await self._gateway.answer(play.key, ask.body)
        except Exception as problem:
            log.exception("a call of %s failed inside the gateway", play.lease.episode_id)
            status, body = failure(AstraFlowError(f"gateway={type(problem).__name__} inside; see the log of the node"))
        finally:
            play.calls.pop(ask.call, None)
        channel.send(Answer(ask.call, status, body))

    def give_back(self, play: _Play, *, lost: bool) -> None:
        """Nothing of it is kept, its lease must be offered to others."""
        wanted, play.wanted = play.wanted, False
        self.end(play, None, None)
        if wanted:  # else the lease is not ours any more
            self._on_given_back(play.lease, lost)

    def end(self, play: _Play, outcome: Outcome | None, error: str | None, code: str = "") -> str | None:
        """The episode is over: called once per play. Gives the error that it is kept with."""
        lease = play.lease
        if self._plays.get(lease.episode_id) is play:
            del self._plays[lease.episode_id]
            self._waiting.pop(lease.episode_id, None)
        capture = self._gateway.close_episode(play.key) if play.key else EpisodeCapture(lease, {})
        self._freed.set()
        engine_lost = error is not None and any(e.ended.done() for e in self._engines.values())
        if not play.wanted or engine_lost:  # of no fault of its own: the lease goes back and is offered again
            self.endings["cancelled"] += 1
            return "cancelled: the episode is not wanted any more"
        wall_s = time.monotonic() - play.received
        episode = build_episode(capture, self._options.node_id, outcome, error, wall_s)
        episode = replace(fitting(episode, self._options.max_tokens), code=code)
        kind = "done" if episode.error is None else error_kind(episode.error)
        if episode.error is not None and kind not in self.endings:
            log.warning("%s failed: %s (others of this kind are counted only)", lease.episode_id, episode.error)
        self.endings[kind] += 1
        self._on_episode(episode)
        return episode.error


def build_episode(
    capture: EpisodeCapture, node_id: str, outcome: Outcome | None, error: str | None, wall_s: float
) -> Episode:
    """Captured calls and the workflow's outcome as one Episode; a failed one has no reward, whatever was sampled."""
    lease = capture.lease
    branches: list[Trajectory] = []
    if error is None:
        try:
            branches = rewarded(capture.calls, outcome or Outcome())
        except EpisodeError as problem:
            error = f"reward: {problem}"
        else:
            if not branches:
                error = "workflow: the episode ended without one answered call; call llm[<policy>].chat"
    return Episode(
        episode_id=lease.episode_id, attempt=lease.attempt, node_id=node_id, task=lease.task, trajectories=branches,
        error=error, metrics=outcome.metrics if outcome is not None else {}, wall_s=wall_s,
    )  # fmt: skip


def fitting(episode: Episode, most: int | None) -> Episode:
    """The dataflow service refuses an episode of more tokens, so it is an error."""
    tokens = sum(t.fork_at + len(t.token_ids) for t in episode.trajectories)
    if most is None or tokens <= most:
        return episode
    error = f"overlong: tokens={tokens} must be at most {most}; end it earlier, or raise dataflow.max_episode_tokens"
    return replace(episode, trajectories=[], error=error)
