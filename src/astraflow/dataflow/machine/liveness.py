"""Who was heard of when. Not part of the state: a replay must not depend on heartbeats, which are not journaled."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from astraflow.config.stages import StagePlan
from astraflow.dataflow.machine.commands import Expire
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import split_id
from astraflow.wire.messages import Offer

LONGEST_LEASE = 10
"""A worker that lives may keep rows this many times `lease_s`, so that one that hangs holds nobody up."""


@dataclass(slots=True)
class Seen:
    """One node, trainer, or worker of a stage."""

    at: float  # run time of its last request
    stats: dict[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)  # nodes: version in force per policy
    notes: dict[str, str] = field(default_factory=dict)  # nodes: for people
    offers: dict[str, Offer] = field(default_factory=dict)  # nodes: policy -> its engines there, for other nodes
    stores: dict[str, int] = field(default_factory=dict)  # trainers: newest version of stores that come later
    silent: bool = False  # trainers: already reported


class Liveness:
    """Deadlines of leases, nodes, trainers and workers of stages."""

    def __init__(self, context: Context, stages: Mapping[str, StagePlan]) -> None:
        self._context, self._stages = context, stages
        self.workers: dict[tuple[str, str], Seen] = {}  # by stage and worker
        self._rows: list[tuple[float, int, str, list[tuple[str, int]]]] = []  # heap: deadline, number, stage, leases
        self.nodes: dict[str, Seen] = {}
        self.trainers: dict[str, Seen] = {}  # by policy
        self._deadlines: list[tuple[float, int, list[tuple[str, int]]]] = []
        self._num_leases = 0

    def restart(self, now: float) -> None:
        """Everybody has just been heard of, every lease has just been given."""
        state = self._context.state
        self._deadlines.clear()
        self._rows.clear()
        for stage in self._stages:
            for worker_id, worker in state.stages[stage].workers.items():
                self.hear_worker(stage, worker_id, now)
                self.watch_rows(stage, list(worker.held.items()), now)
        for node_id, node in state.nodes.items():
            self.hear_node(node_id, now)
            self.watch(list(node.held.items()), now)
        for name, policy in state.policies.items():
            if policy.trainer_id:
                self.hear_trainer(name, now)

    def hear_node(self, node_id: str, now: float) -> Seen:
        """A request of the node arrived."""
        seen = self.nodes.setdefault(node_id, Seen(now))
        seen.at = now
        return seen

    def offers(self, asking: str, policies: Iterable[str]) -> dict[str, list[Offer]]:
        """Policy -> engines of it on all other nodes of the pool."""
        known = self._context.state.nodes
        others = [seen for node_id, seen in self.nodes.items() if node_id != asking and node_id in known]
        return {name: [seen.offers[name] for seen in others if name in seen.offers] for name in policies}

    def hear_trainer(self, policy: str, now: float) -> Seen:
        """A request of the policy's trainer arrived."""
        seen = self.trainers.setdefault(policy, Seen(now))
        seen.at, seen.silent = now, False
        return seen

    def watch(self, leases: list[tuple[str, int]], now: float) -> None:
        """These leases end `timeout_s` from now; the node gets `dead_after_s` more to hand in the result."""
        plan = self._context.plan
        if leases:
            self._num_leases += 1
            heapq.heappush(self._deadlines, (now + plan.timeout_s + plan.dead_after_s, self._num_leases, leases))

    def hear_worker(self, stage: str, worker_id: str, now: float) -> Seen:
        """A request of a worker of a stage arrived."""
        seen = self.workers.setdefault((stage, worker_id), Seen(now))
        seen.at = now
        return seen

    def watch_rows(self, stage: str, leases: list[tuple[str, int]], now: float) -> None:
        """These rows come back by then, however alive their worker is."""
        if leases and stage in self._stages:
            self._num_leases += 1
            deadline = now + LONGEST_LEASE * self._stages[stage].lease_s
            heapq.heappush(self._rows, (deadline, self._num_leases, stage, leases))

    def due(self, now: float) -> Expire | None:
        """What has run out by now; None: nothing."""
        state, plan = self._context.state, self._context.plan
        for node_id in [n for n in self.nodes if n not in state.nodes]:
            del self.nodes[node_id]
        nodes = [n for n in state.nodes if now - self.nodes.setdefault(n, Seen(now)).at > plan.dead_after_s]
        trainers = [p for p in self.trainers if self._went_silent(p, now)]
        leases = [lease for lease in self._overdue(now) if self._held(*lease)]
        workers, rows = self._silent_workers(now), self._overdue_rows(now)
        if not nodes and not leases and not trainers and not workers and not rows:
            while self._deadlines and self._deadlines[0][0] <= now:
                heapq.heappop(self._deadlines)
            while self._rows and self._rows[0][0] <= now:
                heapq.heappop(self._rows)
            return None
        return Expire(nodes, leases, trainers, workers, rows)

    def _silent_workers(self, now: float) -> list[tuple[str, str]]:
        """Workers that the state knows; the others are forgotten here."""
        state, silent = self._context.state, []
        for (stage, worker_id), seen in list(self.workers.items()):
            if now - seen.at > self._stages[stage].lease_s:
                if worker_id in state.stages[stage].workers:
                    silent.append((stage, worker_id))
                else:
                    del self.workers[stage, worker_id]
        return silent

    def _overdue_rows(self, now: float) -> list[tuple[str, str, int]]:
        if not self._rows or self._rows[0][0] > now:
            return []
        late = [(stage, *lease) for at, _, stage, leases in self._rows if at <= now for lease in leases]
        workers = {stage: records.workers.values() for stage, records in self._context.state.stages.items()}
        return [x for x in late if any(w.held.get(x[1]) == x[2] for w in workers[x[0]])]

    def _went_silent(self, policy: str, now: float) -> bool:
        """Not reported yet, and the policy still waits for its trainer."""
        seen = self.trainers[policy]
        late = now - seen.at > self._context.plan.batch_lease_s
        return late and not seen.silent and not self._context.finished_policy(policy)

    def _overdue(self, now: float) -> list[tuple[str, int]]:
        if not self._deadlines or self._deadlines[0][0] > now:
            return []
        return [lease for deadline, _, leases in self._deadlines if deadline <= now for lease in leases]

    def _held(self, episode_id: str, attempt: int) -> bool:
        group_id, k = split_id(episode_id)
        group = self._context.state.groups.get(group_id)
        return group is not None and group.holders[k] is not None and group.attempts[k] == attempt
