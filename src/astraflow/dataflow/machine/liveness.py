"""Who was heard of when. Not part of the state: a replay must not depend on heartbeats, which are not journaled."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from astraflow.dataflow.machine.commands import Expire
from astraflow.dataflow.machine.plan import Context


@dataclass(slots=True)
class Seen:
    """One node or trainer."""

    at: float  # run time of its last request
    stats: dict[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)  # nodes: version in force per policy
    cancelled: list[tuple[str, int]] = field(default_factory=list)  # nodes: (episode, attempt), for the next reply
    silent: bool = False  # trainers: already reported


class Liveness:
    """Deadlines of leases, nodes and trainers."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.nodes: dict[str, Seen] = {}
        self.trainers: dict[str, Seen] = {}  # by policy
        self._deadlines: list[tuple[float, int, list[tuple[str, int]]]] = []
        self._num_leases = 0

    def restart(self, now: float) -> None:
        """Everybody has just been heard of, every lease has just been given."""
        state = self._context.state
        self._deadlines.clear()
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

    def due(self, now: float) -> Expire | None:
        """What has run out by now; None: nothing."""
        state, plan = self._context.state, self._context.plan
        for node_id in [n for n in self.nodes if n not in state.nodes]:
            del self.nodes[node_id]
        nodes = [n for n in state.nodes if now - self.nodes.setdefault(n, Seen(now)).at > plan.dead_after_s]
        trainers = [p for p in self.trainers if self._went_silent(p, now)]
        leases = [lease for lease in self._overdue(now) if self._held(*lease)]
        if not nodes and not leases and not trainers:
            while self._deadlines and self._deadlines[0][0] <= now:
                heapq.heappop(self._deadlines)
            return None
        return Expire(nodes, leases, trainers)

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
        group_id, _, k = episode_id.rpartition("/")
        group = self._context.state.groups.get(group_id)
        return group is not None and group.holders[int(k)] is not None and group.attempts[int(k)] == attempt
