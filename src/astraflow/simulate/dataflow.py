"""The data service: the staleness gate, groups, one queue for each policy, batches.

The gate and the check at hand-out are those of `dataflow.machine.admission.gate`, for batches of whole groups.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from astraflow.errors import Problem
from astraflow.simulate.clock import Clock

_NOT_CALLED = "not_called"


@dataclass
class Trained:
    """One trained policy, as the service knows it. `waiting`: (oldest version, order, oldest version of each row)."""

    groups: int
    max_staleness: int
    steps: int
    kept: float
    max_dropped: int
    version: int = 0
    admitted: int = 0
    trained: int = 0
    in_flight: int = 0
    waiting: list[tuple[int, int, list[int]]] = field(default_factory=list)
    asked: Callable[[list[list[int]]], None] | None = None  # the trainer waits for a batch
    dropped: dict[str, int] = field(default_factory=dict)
    num_dropped_in_a_row: int = 0

    @property
    def limit(self) -> int:
        """Groups that may be in flight now."""
        return self.groups * (1 + min(self.max_staleness, self.steps - self.version - 1))


@dataclass
class OpenGroup:
    """A task whose episodes are played. `rows`: policy -> oldest version of each episode that called it."""

    number: int
    num_open: int
    rows: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lease:
    """One episode to play."""

    group: OpenGroup
    sibling: int
    min_versions: dict[str, int]


class Dataflow:
    """Groups of `group_size` episodes. `barrier`: all policies train together on what one round of groups gave."""

    def __init__(self, clock: Clock, trained: dict[str, Trained], group_size: int, seed: int, barrier: bool) -> None:
        self.clock, self.policies, self._size, self._barrier = clock, trained, group_size, barrier
        self._random = np.random.default_rng((seed, 1))
        self._pending: deque[tuple[OpenGroup, int]] = deque()
        self._waiters: deque[tuple[int, Callable[[list[Lease]], None]]] = deque()
        self._opened = 0
        self._completed = 0
        self._round_left = max((p.groups for p in trained.values()), default=0)
        self.on_round: Callable[[], None] = lambda: None

    @property
    def over(self) -> bool:
        """All steps of all policies are made."""
        return all(policy.version >= policy.steps for policy in self.policies.values())

    def lease(self, count: int, reply: Callable[[list[Lease]], None]) -> None:
        """Up to `count` episodes, as soon as there is one."""
        self._waiters.append((count, reply))
        self._serve()

    def lease_now(self, count: int) -> list[Lease]:
        """Up to `count` episodes of those that may be played at once: what a commit brings back."""
        return self._pick(count)

    def commit(self, group: OpenGroup, versions: dict[str, int]) -> None:
        """An episode is over; `versions`: the oldest of each policy that it called."""
        for name, version in versions.items():
            group.rows.setdefault(name, []).append(version)
        group.num_open -= 1
        if not group.num_open:
            self._complete(group)

    def ask_batch(self, name: str, reply: Callable[[list[list[int]]], None]) -> None:
        """A trainer waits for its next batch: rows of each group, by their oldest version."""
        self.policies[name].asked = reply
        self._form(name)

    def acknowledge(self, name: str, num_groups: int) -> None:
        """The step is trained and its version published."""
        policy = self.policies[name]
        policy.version += 1
        policy.in_flight -= num_groups
        policy.trained += num_groups
        self.clock.num_since_step = 0
        self._serve()

    def next_round(self) -> None:
        """With a barrier: all have trained."""
        self._round_left = max((p.groups for p in self.policies.values() if p.version < p.steps), default=0)
        self._serve()

    def all_of(self, name: str) -> list[list[int]]:
        """With a barrier: everything that waits for a policy."""
        policy = self.policies[name]
        rows = [rows for _, _, rows in policy.waiting]
        policy.waiting.clear()
        return rows

    def _open(self) -> bool:
        if self.over:
            return False
        if self._barrier:
            return self._round_left > 0
        return all(p.in_flight < p.limit for p in self.policies.values() if p.version < p.steps)

    def _serve(self) -> None:
        while self._waiters:
            count, reply = self._waiters[0]
            leases = self._pick(count)
            if not leases:
                return
            self._waiters.popleft()
            reply(leases)

    def _pick(self, count: int) -> list[Lease]:
        oldest = {n: max(0, p.version - (0 if self._barrier else p.max_staleness)) for n, p in self.policies.items()}
        picked: list[Lease] = []
        while len(picked) < count:
            if not self._pending:
                if not self._open():
                    break
                self._admit()
            group, sibling = self._pending.popleft()
            picked.append(Lease(group, sibling, oldest))
        return picked

    def _admit(self) -> None:
        group = OpenGroup(self._opened, self._size)
        self._opened += 1
        self._round_left -= 1
        for policy in self.policies.values():
            counted = policy.version < policy.steps
            policy.admitted += counted
            policy.in_flight += counted
        self._pending.extend((group, k) for k in range(self._size))

    def _complete(self, group: OpenGroup) -> None:
        self._completed += 1
        for name, policy in self.policies.items():
            if policy.version >= policy.steps:
                continue
            rows = group.rows.get(name, [])
            if len(rows) < min(2, self._size):
                self._drop(name, _NOT_CALLED)
            elif policy.kept < 1 and self._random.random() >= policy.kept:
                self._drop(name, "operators")
            else:
                heapq.heappush(policy.waiting, (min(rows), group.number, rows))
                self._form(name)
        if self._barrier and self._completed == self._opened and self._round_left <= 0:
            self.on_round()
        self._serve()

    def _form(self, name: str) -> None:
        policy = self.policies[name]
        if self._barrier or policy.asked is None:
            return
        while policy.waiting and policy.version - policy.waiting[0][0] > policy.max_staleness:
            heapq.heappop(policy.waiting)
            self._drop(name, "stale")
        if len(policy.waiting) >= policy.groups:
            reply, policy.asked = policy.asked, None
            policy.num_dropped_in_a_row = 0
            reply([heapq.heappop(policy.waiting)[2] for _ in range(policy.groups)])
        self._serve()

    def _drop(self, name: str, reason: str) -> None:
        policy = self.policies[name]
        policy.in_flight -= 1
        policy.dropped[reason] = policy.dropped.get(reason, 0) + 1
        if reason == _NOT_CALLED and any(p.version < p.steps for p in self.policies.values() if p is not policy):
            return  # while others train, a policy may go without calls
        policy.num_dropped_in_a_row += 1
        if policy.num_dropped_in_a_row > policy.max_dropped:
            raise Problem(
                f"policies.{name}: groups dropped in a row", policy.num_dropped_in_a_row,
                f"must be at most batch.max_dropped_groups={policy.max_dropped} ({reason})", "raise `kept` or `chance`",
            )  # fmt: skip
