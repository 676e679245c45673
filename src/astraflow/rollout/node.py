"""A rollout node: joins the pool of a run, plays episodes, and only ever opens connections outward.

                     ┌───────────── leases ──────────────┐              versions
    dataflow service │                                   ▼                 │
          ▲   ▲      └── lease loop   runner ─► workers ─► gateway ─► engine ◄── weight loops ◄── weight stores
          │   │                         │
          │   └──────── commit loop ◄───┘ finished episodes
          └──────────── heartbeat loop: I live, what I have done; cancelled episodes, new versions, the end

| loop      | waits for                      | woken by                                           | limit        |
|-----------|--------------------------------|----------------------------------------------------|--------------|
| lease     | an eighth of the places free   | an episode ends; the service has one (long poll)   | 20 s a poll  |
| heartbeat | `heartbeat_s`                  | a timer                                            | -            |
| weights   | a version newer than in force  | a heartbeat or lease reply that announces one      | backoff 8 s  |
| commit    | a finished episode             | an episode ends                                    | -            |
| pool      | a worker that hangs or is gone | a timer                                            | `PoolLimits` |
| engine    | the end of an engine           | the engine                                         | -            |

A loop that ends by an error ends the node, by name. The service may be away, or out of disk, for `give_up_s`: episodes
in play go on and are committed afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from astraflow.config.checks.engines import engine_name
from astraflow.config.env import cache_dir
from astraflow.config.schema import EngineSection, RunConfig, SwarmSection
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.observe.logs import setup_logging
from astraflow.observe.process import settle_memory
from astraflow.rollout.commit import Committer, Reach
from astraflow.rollout.gateway.app import create_app, serve_within
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.loop import Guarded, first_of, in_thread, run_loop
from astraflow.rollout.neighbours.door import lend
from astraflow.rollout.neighbours.places import Neighbours
from astraflow.rollout.pacing.concurrency import Concurrency, adapt
from astraflow.rollout.policies import PolicyOptions, served_here
from astraflow.rollout.pool import PoolLimits, WorkerPool
from astraflow.rollout.runner import Runner, RunnerOptions
from astraflow.rollout.serving.engines import Serving
from astraflow.rollout.stats import NodeStats
from astraflow.rollout.swarm.part import Return, Swarm, SwarmOptions
from astraflow.rollout.swarm.trials import trial_options
from astraflow.rollout.worker.channel import Hello
from astraflow.types import Episode, EpisodeLease, WeightVersion
from astraflow.weights.client import ANNOUNCED_WAIT_S, WeightClient
from astraflow.wire.app import bind
from astraflow.wire.messages import EpisodesReply, Join, LeaseReply, Offer, RunReply
from astraflow.wire.patience import FIRST_ANSWER_S, GONE_S, RETRY_S

log = logging.getLogger("astraflow.node")

POLL_S = 20.0  # longest wait of one request for leases
_SHARE = 8  # of its places, one in so many must be free before more leases are asked for
_SWITCH_S = 0.0005  # the engine's thread and the loop share the interpreter; the default of 5 ms stalls calls


def _say_door(url: str) -> None:
    log.info("swarm clients join at %s", url)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """One node. Seconds."""

    dataflow_url: str
    token: str | None = None
    name: str = "node"
    concurrency: int = 64  # episodes in play at once
    min_concurrency: int = 0  # to which the load of the engines may lower it; 0: it stays
    workers: int = 1  # 0: only clients of its door play
    threads: int = 1  # intra-op threads of an engine
    delay_s: float = 0.0  # added to every call of a workflow
    give_up_s: float = GONE_S  # of silence of the dataflow service
    drain_s: float = 10.0  # to finish what is in play when told to leave; the rest is handed back
    cache: Path = field(default_factory=cache_dir)
    limits: PoolLimits = field(default_factory=PoolLimits)
    watch: bool = False  # edits of the workflow's files are taken up
    engines: Mapping[str, EngineSection] = field(default_factory=dict)  # policy -> what serves it here
    serves: Sequence[str] = ()  # policies that have an engine here; none: as the run file says
    listen: str = ""  # HOST:PORT where other nodes reach its engines; "": as the run file says
    door: socket.socket | None = None  # bound; clients of the swarm come here, see `rollout.swarm`
    on_door: Callable[[str], None] = _say_door  # told the door's URL once it answers


def run_node(options: NodeOptions) -> None:
    """A node as a process of its own, until the run is over or SIGTERM."""
    setup_logging(options.name, secrets=(options.token,))
    run_loop(serve_node(options, signals=(signal.SIGTERM, signal.SIGINT)))


async def serve_node(options: NodeOptions, *, signals: tuple[signal.Signals, ...] = ()) -> None:
    """Returns when the run is over, or after one of `signals` once the node has left the pool.

    Raises: Unreachable: the service did not answer for `give_up_s`. AstraFlowError: a part of the node failed; named.
    """
    loop = asyncio.get_running_loop()
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    node = _Node(options)
    for number in signals:
        loop.add_signal_handler(number, node.leave, number.name)
    try:
        await node.tasks.run(node.live(), node.over)
    finally:
        await node.close()
        for number in signals:
            loop.remove_signal_handler(number)
        sys.setswitchinterval(switch_s)


class _Node:
    """One life of a node. `over` is set when it must go at once: the run has ended, or it was told to twice."""

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._id = f"{options.name}-{uuid.uuid4().hex[:12]}"
        self._client = DataflowClient(options.dataflow_url, options.token, give_up_s=min(RETRY_S, options.give_up_s))
        self._weight_client = WeightClient(options.token, wait_s=ANNOUNCED_WAIT_S, spool=options.cache / "spool")
        self._serving: Serving | None = None  # once the run is known
        self._neighbours: Neighbours | None = None  # where it lacks engines
        self._offers: dict[str, Offer] = {}  # what other nodes may ask
        self._hurry = asyncio.Event()  # a heartbeat has news
        self._reach = Reach(min(FIRST_ANSWER_S, options.give_up_s))
        self._engines: dict[str, str] = {}  # policy -> "<engine>@<node>"
        self._committer = Committer(lambda done, more: self._client.exchange(done, self._engines, more), self._reach)
        self._plays = options.workers > 0 or options.door is not None  # else its engines are for others
        self._leaving = asyncio.Event()
        self._closing = contextlib.AsyncExitStack()
        self._join: Join | None = None
        self._runners: list[Runner] = []  # empty: still being built
        self._swarm: Swarm | None = None
        self._stats = NodeStats(self._committer)
        self._finished = False  # the run is over
        self.over = asyncio.Event()
        self.tasks = Guarded(f"node {options.name}")

    def leave(self, why: str) -> None:
        """Finish or hand back what is in play, then go; asked a second time, or still being built: go at once."""
        log.info("%s: leaving the pool", why)
        at_once = self._leaving.is_set() or not self._runners
        (self.over if at_once else self._leaving).set()

    async def live(self) -> None:
        """Join, build, play until told to leave."""
        reply = await self._reach.ask("run", self._client.run)
        self._reach.limit_s = self._options.give_up_s
        if reply.finished:
            log.info("the run is over already")
            return
        options = self._options
        run = RunConfig.model_validate(reply.config)
        config, served = served_here(run, options.name, options.engines, options.serves)
        self._engines = {name: f"{engine_name(p.engine)}@{options.name}" for name, p in config.policies.items()}
        shared = PolicyOptions(options.cache, config.run.seed, self._id, options.concurrency, options.threads)
        self._serving = Serving(config, shared, self._weight_client, self._start_waiting, served)
        if (lacking := self._serving.lacking) and self._plays:
            self._neighbours = Neighbours(lacking, socket.gethostname(), options.token, self._start_waiting)
        heartbeat_s = await self._enter(reply)
        self.tasks.spawn("heartbeat loop", self._heartbeats(heartbeat_s))
        local = await self._build(config, self._serving)
        self.tasks.spawn("commit loop", self._committer.run())
        for runner in self._runners:
            self.tasks.spawn("deadline loop", runner.keep_deadlines(self._options.limits.pulse_s))
        leases = self.tasks.spawn("lease loop", self._leases(local, self._swarm)) if self._runners else None
        settle_memory()
        log.info("playing up to %d episodes at once", self._capacity(config))
        await self._leaving.wait()
        if leases is not None:
            leases.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                for runner in self._runners:
                    await runner.emptied()
                await self._committer.settled()

    async def close(self) -> None:
        """Leave the pool (leases are given back) and end every part."""
        if self._join is not None:
            try:
                await asyncio.wait_for(in_thread(lambda: self._client.drain(self._id), "leave"), 2.0)
            except (TimeoutError, WireError) as error:
                log.info("left without a goodbye (%s)", error or "no answer")
        await self._closing.aclose()
        self._weight_client.close()
        self._client.close()
        log.info("left: %s", self._stats.summary())

    def _capacity(self, config: RunConfig) -> int:
        """Episodes that the node may hold."""
        local = self._options.concurrency if self._options.workers else 0
        return local + (_swarm_section(config).max_episodes if self._options.door is not None else 0)

    async def _build(self, config: RunConfig, serving: Serving) -> Runner | None:
        """Engines, gateway, workers, door; gives the runner of the workers.

        Raises: ModelError, AstraFlowError: one of them cannot be built.
        """
        options = self._options
        self._closing.callback(serving.close)
        await serving.start()
        serving.keep(self.tasks)
        await self._lend(config, serving)
        if self._neighbours is not None:
            self.tasks.spawn("look at other nodes", self._neighbours.watch())
            await serving.reach(self._neighbours)
        engines = serving.engines
        gateway = Gateway(serving.endpoints, config.workflow.call_timeout_s)
        pool = await self._start_workers(config, gateway, list(engines)) if options.workers else None
        most = config.dataflow.max_episode_tokens
        local = None
        if pool is not None:
            step_s = config.workflow.step_timeout_s
            load = Concurrency(options.concurrency, options.min_concurrency)
            plays = RunnerOptions(self._id, load.limit, options.delay_s, most, step_timeout_s=step_s)
            local = Runner(plays, gateway, engines, pool, self._hand_in, serving.announced)
            if load.adapts:
                self.tasks.spawn("concurrency loop", adapt(load, local, [engine for _, engine, _ in serving.pairs()]))
        self._runners = [] if local is None else [local]
        if options.door is not None:
            self._swarm = self._open_door(config, options.door, gateway, serving)
            self._runners.append(self._swarm.runner)
        self._stats.watch(serving, gateway, self._runners, pool, self._swarm)
        return local

    async def _start_workers(self, config: RunConfig, gateway: Gateway, policies: list[str]) -> WorkerPool:
        options, workflow = self._options, config.workflow
        door = bind("127.0.0.1", 0, "gateway")
        url = await serve_within(self.tasks, self._closing, "gateway", create_app(gateway), door) + "/v1"
        hello = Hello(
            workflow.type, workflow.options, policies, url, options.limits.pulse_s,
            max_output_bytes=workflow.max_output_bytes,
        )  # fmt: skip
        pool = WorkerPool(options.workers, hello, self._start_waiting, options.limits, watch=options.watch)
        self._closing.push_async_callback(pool.close)
        await pool.start()
        self.tasks.spawn("worker pool", pool.watch())
        return pool

    def _open_door(self, config: RunConfig, door: socket.socket, gateway: Gateway, serving: Serving) -> Swarm:
        section, engines = _swarm_section(config), serving.engines
        chats = {name: endpoint.chat for name, endpoint in serving.endpoints.items()}
        options = SwarmOptions(
            node_id=self._id, dead_after_s=section.dead_after_s, max_episodes=section.max_episodes,
            max_episode_tokens=config.dataflow.max_episode_tokens, token=self._options.token,
            step_timeout_s=config.workflow.step_timeout_s, trials=trial_options(config, chats, self._client.row),
        )  # fmt: skip
        swarm = Swarm(options, gateway, engines, self._hand_in, serving.announced)
        self.tasks.spawn("swarm door", swarm.serve(door, self._options.on_door))
        self.tasks.spawn("swarm pool", swarm.watch())
        self.tasks.spawn("swarm returns", swarm.send_back(self._give_back))
        return swarm

    async def _lend(self, config: RunConfig, serving: Serving) -> None:
        """The engines of this node for others, where one of them may lack some."""
        options = self._options
        listen = options.listen or config.node(options.name).listen
        if listen or serving.lacking or any(node.serves for node in config.rollout.nodes):
            engines = {name: serving.endpoints[name].engines for name in serving.served}
            url = await lend(engines, listen, options.token, self.tasks, self._closing)
            self._offers = {name: Offer(url, socket.gethostname(), self._engines[name]) for name in engines}
            self._hurry.set()

    def _hand_in(self, episode: Episode) -> None:
        assert self._serving is not None
        far = self._serving.sampled_far(episode)
        self._committer.add(replace(episode, engines=far) if far else episode)

    def _start_waiting(self) -> None:
        for runner in self._runners:
            runner.start_waiting()

    def _hear(self, versions: Mapping[str, WeightVersion], finished: bool) -> None:
        if self._serving is not None:
            self._serving.hear(versions)
        if finished and not self._finished:
            log.info("the run is over")
            self._finished = True
            self.tasks.spawn("goodbye", self._say_over())

    async def _say_over(self) -> None:
        if self._swarm is not None:
            await self._swarm.tell_over()
        self.over.set()

    async def _enter(self, reply: RunReply) -> float:
        self._join = Join(
            node_id=self._id, name=self._options.name, capacity=self._options.concurrency if self._plays else 0,
            run_id=reply.run_id, host=socket.gethostname(),
        )  # fmt: skip
        return await self._rejoin()

    async def _rejoin(self) -> float:
        """Enter the pool; what is in play belongs to others by now. Gives the heartbeat's period."""
        join = self._join
        assert join is not None
        for runner in self._runners:
            runner.cancel_all()
        reply = await self._reach.ask("join", lambda: self._client.join(join))
        self._hear(reply.versions, False)
        return reply.heartbeat_s

    async def _heartbeats(self, period_s: float) -> None:
        lacks = self._neighbours.policies if self._neighbours is not None else []
        while True:
            stats, versions, notes = self._stats.read(), self._stats.versions(), self._stats.notes()
            playing = [attempt for runner in self._runners for attempt in runner.playing()]
            try:
                reply = await self._reach.ask(
                    "heartbeat",
                    lambda: self._client.heartbeat(self._id, stats, versions, playing, notes, self._offers, lacks),  # noqa: B023
                )
            except WireError as error:
                await self._refused(error)
            else:
                self._hear(reply.versions, reply.finished)
                if self._neighbours is not None:
                    self._neighbours.hear(reply.offers)
                for runner in self._runners:
                    runner.cancel(reply.cancelled)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await self._hurry.wait()
                self._hurry.clear()

    async def _leases(self, local: Runner | None, swarm: Swarm | None) -> None:
        """As many as there are free places and clients that ask."""
        while not self._finished:
            count = await self._room(local, swarm)
            reply: EpisodesReply | LeaseReply | None = await self._committer.exchange(count)  # what has ended was held
            request_id = uuid.uuid4().hex  # a request whose answer is lost is asked again, and gets the same leases
            try:
                if reply is None or not (reply.leases or reply.finished):
                    reply = await self._reach.ask(
                        "leases",
                        lambda: self._client.lease(self._id, count, wait_s=POLL_S, request_id=request_id),  # noqa: B023
                    )
            except WireError as error:
                await self._refused(error)
            else:
                self._hear(reply.versions, reply.finished)
                self._accept(reply.leases, local, swarm)

    async def _room(self, local: Runner | None, swarm: Swarm | None) -> int:
        waits: list[Coroutine[Any, Any, object]] = []
        if local is not None:
            waits.append(local.room(_SHARE))
        if swarm is not None:
            waits.append(swarm.asked())
        await first_of(*waits)
        return (local.free if local is not None else 0) + (swarm.wanted if swarm is not None else 0)

    def _accept(self, leases: Sequence[EpisodeLease], local: Runner | None, swarm: Swarm | None) -> None:
        """Clients that wait come first; what then has no place waits for clients."""
        for runner in self._runners:
            runner.cancel((lease.episode_id, lease.attempt - 1) for lease in leases)
        asked = swarm.wanted if swarm is not None else 0
        free = local.free if local is not None else 0
        if local is not None:
            local.accept(leases[asked : asked + free] if swarm is not None else leases)
        if swarm is not None:
            swarm.runner.accept([*leases[:asked], *leases[asked + free :]])

    async def _give_back(self, leases: Sequence[Return]) -> None:
        try:
            await self._reach.ask("return", lambda: self._client.give_back(self._id, leases))
        except WireError as error:
            await self._refused(error)  # the service knows nothing of them any more: they are free already

    async def _refused(self, error: WireError) -> None:
        """404: the service gave us up (or forgot us), enter again. 410: the run is over. Else: an error of ours."""
        if error.status == 404:
            log.warning("%s", error)
            await self._rejoin()
        elif error.status == 410:
            self._hear({}, True)
        else:
            raise error


def _swarm_section(config: RunConfig) -> SwarmSection:
    return config.rollout.swarm or SwarmSection()
