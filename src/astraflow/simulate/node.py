"""A node: asks for leases when an eighth of its places is free, plays, commits, fetches versions that it hears of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from astraflow.config.schema import NodeSection
from astraflow.simulate.clock import Clock, Fifo, Host, Line
from astraflow.simulate.dataflow import Dataflow, Lease
from astraflow.simulate.engine import Engine
from astraflow.simulate.episodes import Episodes, Planned
from astraflow.simulate.profile import Profile

_SHARE = 8
_MOST_COMMITTED = 256


class Versions:
    """What trainers published: when each version may be read. Policies that are not trained have version 0."""

    def __init__(self, clock: Clock, trained: Iterable[str]) -> None:
        self._clock = clock
        self._visible: dict[str, list[float]] = {name: [0.0] for name in trained}

    def publish(self, name: str, after_s: float) -> None:
        """The next one, readable after so long."""
        self._visible[name].append(self._clock.now + after_s)

    def wait_s(self, name: str, version: int) -> float:
        """Until it is there."""
        return max(0.0, self._visible[name][version] - self._clock.now)

    def __contains__(self, name: str) -> bool:
        return name in self._visible


@dataclass(frozen=True)
class Around:
    """What all nodes share."""

    clock: Clock
    profile: Profile
    dataflow: Dataflow
    versions: Versions
    episodes: Episodes
    up: Line  # from nodes
    down: Line  # to nodes


@dataclass
class _Play:
    lease: Lease
    calls: list[Planned]
    received: float
    begun: int = 0
    versions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Exchange:
    """What has ended goes first, then `count` leases are asked for: in the request of the last of them, where one is
    still to be sent."""

    count: int
    until: int  # committed, of all that this node plays
    with_leases: bool


class Node:
    """As `section` says, but that it stays to the end."""

    def __init__(
        self, around: Around, policies: dict[str, str], section: NodeSection, host: Callable[[], Host]
    ) -> None:
        """`policies`: each with the one whose engine serves it."""
        self._around, self._clock = around, around.clock
        self._concurrency, self._delay_s = section.concurrency, section.delay_s
        costs = around.profile
        self.own_engines = {
            name: Engine(self._clock, host(), costs.cost(name).engine, self._concurrency)
            for name in dict.fromkeys(policies.values())
        }
        self.engines = {name: self.own_engines[first] for name, first in policies.items()}
        self._loop = Fifo(host())
        self._worker = Fifo(host())
        self._worker_s = costs.serving.worker_s / max(1, section.workers)
        self._announced = dict.fromkeys(policies, 0)
        self._fetching: set[str] = set()
        self._in_play = 0
        self._waiting: list[_Play] = []
        self._finished: list[_Play] = []
        self._asking = self._ask_planned = False
        self._sent = -1e9
        self._send_plan = self._num_sending = self._num_committed = 0
        self._exchange: _Exchange | None = None
        self.weight_bytes, self.num_played = 0.0, 0

    def join(self, heartbeat_s: float) -> None:
        """From now on it is in the pool."""
        for name, engine in self.engines.items():
            trained = name in self._around.versions
            engine.versions[name] = -1 if trained else 0
            if trained:
                self._follow(name)
        self._beat(heartbeat_s)
        self._ask()

    def busy_s(self) -> float:
        """Mean over its engines, so far."""
        return sum(engine.busy_s() for engine in self.engines.values()) / len(self.engines)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _request(self, num_bytes: float, act: Callable[[], None]) -> None:
        """`act` at the service."""
        network, serving = self._around.profile.network, self._around.profile.serving
        took = self._around.up.send(num_bytes) + network.rtt_s / 2 + serving.request_s
        self._clock.after(took, act)

    def _reply(self, num_bytes: float, act: Callable[[], None]) -> None:
        """`act` at the node; it hears of new versions with every reply."""
        newest = {name: policy.version for name, policy in self._around.dataflow.policies.items()}

        def arrived() -> None:
            for name, version in newest.items():
                self._announce(name, version)
            act()

        self._clock.after(self._around.down.send(num_bytes) + self._around.profile.network.rtt_s / 2, arrived)

    def _beat(self, every_s: float) -> None:
        size = self._around.profile.network.message_bytes
        self._request(size, lambda: self._reply(size, lambda: self._clock.after(every_s, lambda: self._beat(every_s))))

    def _ask_soon(self) -> None:
        """What ends at one moment is one request."""
        if not self._ask_planned:
            self._ask_planned = True
            self._clock.after(0.0, self._ask)

    def _ask(self) -> None:
        self._ask_planned = False
        count = self._concurrency - self._in_play
        if self._asking or count < max(1, self._concurrency // _SHARE) or self._around.dataflow.over:
            return
        self._asking = True
        backlog = len(self._finished) + self._num_sending
        if not backlog:
            self._lease(count)
            return
        self._exchange = _Exchange(count, self._num_committed + backlog, bool(self._finished))
        self._send_soon()

    def _lease(self, count: int) -> None:
        size = self._around.profile.network.message_bytes
        self._request(size, lambda: self._around.dataflow.lease(count, self._given))

    def _given(self, leases: list[Lease]) -> None:
        self._reply(self._size_of(leases), lambda: self._accept(leases))

    def _size_of(self, leases: list[Lease]) -> float:
        return self._around.profile.network.message_bytes * (1 + len(leases) / 4)

    # -- episodes ------------------------------------------------------------------------------------------------------

    def _accept(self, leases: list[Lease]) -> None:
        self._asking = False
        for lease in leases:
            calls = self._around.episodes.of(lease.group.number, lease.sibling)
            self._waiting.append(_Play(lease, calls, self._clock.now))
        self._in_play += len(leases)
        self._start_waiting()
        if self._waiting:
            self._clock.after(self._around.profile.serving.patience_s, self._start_waiting)
        self._ask_soon()

    def _start_waiting(self) -> None:
        versions = {name: engine.versions[name] for name, engine in self.engines.items()}
        fresh = all(versions[name] >= newest for name, newest in self._announced.items())
        patient_since = self._clock.now - self._around.profile.serving.patience_s + 1e-9
        waiting, self._waiting = self._waiting, []
        for play in waiting:
            able = all(versions.get(name, 0) >= oldest for name, oldest in play.lease.min_versions.items())
            if able and (fresh or play.received <= patient_since):
                self._call(play)
            else:
                self._waiting.append(play)

    def _call(self, play: _Play) -> None:
        if play.begun == len(play.calls):
            self._end(play)
            return
        call = play.calls[play.begun]
        play.begun += 1
        delay_s = call.delay_s + self._delay_s
        if delay_s:
            self._clock.after(delay_s, lambda: self._worker.add(self._worker_s, lambda: self._serve(play, call)))
        else:
            self._worker.add(self._worker_s, lambda: self._serve(play, call))

    def _serve(self, play: _Play, call: Planned) -> None:
        def answered(version: int) -> None:
            play.versions[call.policy] = min(version, play.versions.get(call.policy, version))
            self._call(play)

        engine = self.engines[call.policy]
        self._loop.add(
            self._around.profile.serving.call_s,
            lambda: engine.submit(call.policy, call.tokens, call.prompt_tokens, answered),
        )

    def _end(self, play: _Play) -> None:
        self._in_play -= 1
        self.num_played += 1
        self._finished.append(play)
        self._send_soon()
        self._ask_soon()

    # -- commits -------------------------------------------------------------------------------------------------------

    def _send_soon(self) -> None:
        """At least `commit_apart_s` after the request before, unless there is enough, or the lease loop waits."""
        if self._num_sending or not self._finished:
            return
        self._send_plan += 1
        plan = self._send_plan
        at_once = self._exchange is not None or len(self._finished) >= _MOST_COMMITTED
        wait_s = (
            0.0 if at_once else max(0.0, self._sent + self._around.profile.serving.commit_apart_s - self._clock.now)
        )
        self._clock.after(wait_s, lambda: self._send() if plan == self._send_plan else None)

    def _send(self) -> None:
        if self._num_sending or not self._finished:
            return
        sent, self._finished = self._finished[:_MOST_COMMITTED], self._finished[_MOST_COMMITTED:]
        self._num_sending, self._sent = len(sent), self._clock.now
        wants = self._exchange
        asks = wants is not None and wants.with_leases and self._num_committed + len(sent) >= wants.until
        more = wants.count if wants is not None and asks else 0
        network = self._around.profile.network
        tokens = sum(call.tokens + call.prompt_tokens for play in sent for call in play.calls)
        size = network.message_bytes + len(sent) * network.episode_bytes + tokens * network.token_bytes
        self._request(size, lambda: self._committed(sent, more))

    def _committed(self, sent: list[_Play], more: int) -> None:
        dataflow = self._around.dataflow
        for play in sent:
            dataflow.commit(play.lease.group, play.versions)
            if not play.lease.group.num_open:
                self._around.episodes.forget(play.lease.group.number)
        leases = dataflow.lease_now(more)
        self._reply(self._size_of(leases), lambda: self._acknowledged(leases))

    def _acknowledged(self, leases: list[Lease]) -> None:
        self._num_committed += self._num_sending
        self._num_sending = 0
        wants = self._exchange
        if wants is not None and self._num_committed >= wants.until:
            self._exchange = None
            if leases:
                self._accept(leases)
            else:
                self._lease(wants.count)
        self._send_soon()

    # -- weights -------------------------------------------------------------------------------------------------------

    def _announce(self, name: str, version: int) -> None:
        if name in self._announced and version > self._announced[name]:
            self._announced[name] = version
            self._follow(name)

    def _follow(self, name: str) -> None:
        engine, network = self.engines[name], self._around.profile.network
        wanted = self._announced[name]
        have = engine.versions[name]
        if name in self._fetching or wanted <= have:
            return
        self._fetching.add(name)
        cost = self._around.profile.cost(name).weights
        behind = wanted - have
        size = cost.full_bytes
        if have >= 0 and cost.delta_bytes:
            size = min(size, behind * cost.delta_bytes) if size else behind * cost.delta_bytes
        for trip in range(network.trips):
            self._around.up.send(network.message_bytes)
            if trip:
                self._around.down.send(network.message_bytes)  # the manifest; the tensors come last
        self.weight_bytes += size

        def in_force() -> None:
            self._fetching.discard(name)
            self._start_waiting()
            self._follow(name)

        def read() -> None:
            took = self._around.down.send(size) + network.rtt_s / 2 + (network.trips - 1) * network.rtt_s
            self._clock.after(took + cost.apply_s, lambda: engine.swap(name, wanted, in_force))

        self._clock.after(network.rtt_s / 2 + self._around.versions.wait_s(name, wanted), read)
