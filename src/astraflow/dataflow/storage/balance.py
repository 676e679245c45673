"""Rows of one batch over data-parallel ranks, so that each has about as many tokens to compute."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_Parts = tuple[object, ...]  # nested pairs of (earlier parts, part), a tree whose leaves are item numbers
_Partial = tuple[int, int, list[tuple[int, _Parts]]]  # minus the difference of its sums, order, (sum, items) falling


def partition(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Item numbers of each rank, rising; the rank with most comes first. Deterministic.

    The largest differencing method: every item begins as a partition of its own, and the two partitions whose sums
    differ most are merged, largest sum of one with smallest of the other, until one is left. O(n k log(n k)).
    Source: Karmarkar and Karp 1982, "The differencing method of set partitioning"; k-way as in Michiels et al. 2003.
    """
    if num_ranks == 1:
        return [list(range(len(sizes)))]
    if num_ranks > len(sizes):  # some get nothing
        kept = max(1, len(sizes))
        return partition(sizes, kept) + [[] for _ in range(num_ranks - kept)]
    empty: list[tuple[int, _Parts]] = [(0, ())] * (num_ranks - 1)
    heap: list[_Partial] = [(-size, i, [(size, (i,)), *empty]) for i, size in enumerate(sizes)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged: list[tuple[int, _Parts]] = [
            (a + b, (p, q)) for (a, p), (b, q) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=_sum, reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [sorted(_leaves(parts)) for _, parts in heap[0][2]]


@lru_cache(maxsize=4)
def _known_partition(sizes: tuple[int, ...], num_ranks: int) -> list[list[int]]:
    """All ranks of a batch ask for a share of the same one, and for thousands of episodes it takes a while."""
    return partition(sizes, num_ranks)


def share(lengths: np.ndarray, owners: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Row numbers, rising, of one rank: all rows of its episodes, whose forks need their prefix; siblings may part.

    Args: lengths: [rows] tokens. owners: [rows] number of the episode of each row.
    """
    episodes, number = np.unique(owners, return_inverse=True)
    sizes = np.bincount(number, weights=lengths, minlength=len(episodes)).astype(np.int64)
    mine = np.zeros(len(episodes), bool)
    mine[_known_partition(tuple(sizes.tolist()), ranks)[rank]] = True
    return np.flatnonzero(mine[number])


def _sum(part: tuple[int, _Parts]) -> int:
    return part[0]


def _leaves(parts: object) -> list[int]:
    """Leaves of the tree, without recursion: it is as deep as there are items."""
    found: list[int] = []
    todo = [parts]
    while todo:
        node = todo.pop()
        if isinstance(node, int):
            found.append(node)
        elif isinstance(node, tuple):
            todo.extend(node)
    return found
