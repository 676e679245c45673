"""Groups of one policy that wait for a batch, in the order in which they leave: two heaps over `PolicyState.queue`.

The heaps hold keys only, are made again from the queue at a start, and keep keys of groups that have left until these
come up or outnumber the others, so that every operation is O(log n) in what waits (spread over many).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from astraflow.dataflow.machine.records import PolicyState, QueuedGroup

_SPARE_KEYS = 64


class Size(NamedTuple):
    """How much some groups are."""

    groups: int
    episodes: int
    tokens: int  # sampled

    def plus(self, other: Size) -> Size:
        """Both together."""
        return Size(self.groups + other.groups, self.episodes + other.episodes, self.tokens + other.tokens)


NOTHING = Size(0, 0, 0)


def size_of(group: QueuedGroup) -> Size:
    """The size of one group."""
    return Size(1, len(group.entries), sum(e.part.num_tokens for e in group.entries))


class Waiting:
    """The queue of one policy. `order`: edf (oldest version first, then arrival) or fifo (arrival)."""

    def __init__(self, policy: PolicyState, order: str) -> None:
        self._policy, self._fifo = policy, order == "fifo"
        self._by_version: dict[int, Size] = {}
        policy.queue_episodes = policy.queue_tokens = 0
        for group in policy.queue.values():
            self._count(group, 1)
        self._sort()

    @property
    def size(self) -> Size:
        """Of all that waits."""
        policy = self._policy
        return Size(len(policy.queue), policy.queue_episodes, policy.queue_tokens)

    def last_chance(self, version: int) -> Size:
        """Of the groups whose oldest version is `version`."""
        return self._by_version.get(version, NOTHING)

    def push(self, group: QueuedGroup) -> None:
        """A group starts to wait."""
        self.put_back(self._policy.num_arrived, group)
        self._policy.num_arrived += 1

    def pop(self) -> tuple[int, QueuedGroup]:
        """Arrival and group of what leaves first.

        Raises: IndexError: nothing waits.
        """
        while True:
            arrival = heapq.heappop(self._order)[1]
            if arrival in self._policy.queue:
                return arrival, self._remove(arrival)

    def take(self, arrival: int) -> QueuedGroup:
        """Remove one group, wherever it stands."""
        return self._remove(arrival)

    def put_back(self, arrival: int, group: QueuedGroup) -> None:
        """Undo `pop`."""
        self._policy.queue[arrival] = group
        heapq.heappush(self._ages, (group.min_version, arrival))
        if self._fifo:
            heapq.heappush(self._order, (0, arrival))
        self._count(group, 1)

    def pop_older(self, version: int) -> Iterator[QueuedGroup]:
        """Groups with a token older than `version`, oldest first."""
        while self._ages and self._ages[0][0] < version:
            arrival = heapq.heappop(self._ages)[1]
            if arrival in self._policy.queue:
                yield self._remove(arrival)

    def _remove(self, arrival: int) -> QueuedGroup:
        group = self._policy.queue.pop(arrival)
        self._count(group, -1)
        if max(len(self._order), len(self._ages)) > 2 * len(self._policy.queue) + _SPARE_KEYS:
            self._sort()
        return group

    def _sort(self) -> None:
        """Make the heaps from the queue."""
        self._ages = [(group.min_version, arrival) for arrival, group in self._policy.queue.items()]
        heapq.heapify(self._ages)
        self._order = self._ages
        if self._fifo:
            self._order = [(0, arrival) for arrival in self._policy.queue]
            heapq.heapify(self._order)

    def _count(self, group: QueuedGroup, sign: int) -> None:
        one, known = size_of(group), self.last_chance(group.min_version)
        left = Size(known.groups + sign, known.episodes + sign * one.episodes, known.tokens + sign * one.tokens)
        if left.groups:
            self._by_version[group.min_version] = left
        else:
            del self._by_version[group.min_version]
        self._policy.queue_episodes += sign * one.episodes
        self._policy.queue_tokens += sign * one.tokens
