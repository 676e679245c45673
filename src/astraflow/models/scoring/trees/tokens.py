"""The tree of a pack whose sequences share their starts, and how attention reads it without going twice along a path.

The computed tokens lie depth first, each sequence with what it does not share (models/scoring/trees/prefixes.py):

    place     0 1 2 3 4 5 6 | 7 8 9 | 10 11       7 8 9 continue 0 .. 3, and 10 11 continue 0 1
    read by   -----------------------------       own tokens: causal attention inside each sequence's own
                                                  stretch 0 1: keys of 7 .. 11
                                                  stretch 2 3: keys of 7 8 9

What comes after a token and before the end of its subtree continues it, so keys and readers of a stretch are slices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from astraflow.models.scoring.offsets import offsets, ramps
from astraflow.models.scoring.trees.prefixes import shared_with_previous

WORTH_TOKENS = 128  # a stretch that saves fewer repeated positions costs more than it saves


class TokenTree(NamedTuple):
    """S sequences in the order of their own tokens; all [S] int64."""

    first: np.ndarray  # where each starts in the positions of the pack
    lengths: np.ndarray
    shared: np.ndarray  # tokens in common with the sequence before it
    begin: np.ndarray  # [S + 1] places of its own tokens, which are as many as it does not share


class Stretch(NamedTuple):
    """Computed tokens, and those that continue them outside the sequence which they belong to."""

    keys: slice
    readers: slice


def token_tree(cu_lengths: np.ndarray, places: np.ndarray) -> TokenTree:
    """Of a pack. Args: cu_lengths: [S + 1]; places: [T] int64, the places of each sequence's positions."""
    starts = cu_lengths[:-1].astype(np.int64)
    lengths = np.diff(cu_lengths).astype(np.int64)
    order = np.argsort(places[starts + lengths - 1], kind="stable")
    shared = shared_with_previous(places, starts[order], lengths[order])
    return TokenTree(starts[order], lengths[order], shared, offsets(lengths[order] - shared))


def subtree_ends(tree: TokenTree, places: np.ndarray) -> np.ndarray:
    """[U] int64: place u is continued by the places from u to before `subtree_ends[u]`."""
    ends = np.full(int(tree.begin[-1]), tree.begin[-1])
    for i in range(1, len(tree.lengths)):  # what the next sequence does not continue ends where that begins
        before = int(tree.first[i - 1])
        ends[places[before + int(tree.shared[i]) : before + int(tree.lengths[i - 1])]] = tree.begin[i]
    return ends


def depths(tree: TokenTree) -> np.ndarray:
    """[U] int64: position of each computed token in its sequence."""
    own = tree.lengths - tree.shared
    values: np.ndarray = ramps(own) + np.repeat(tree.shared, own)
    return values


def stretches(tree: TokenTree, places: np.ndarray) -> tuple[np.ndarray, list[Stretch]]:
    """What is read as stretches, and [S] int64 from which position on each sequence attends to itself.

    Every key of a token lies either in one stretch that it reads or in its sequence from that position on. Starts that
    are too short or shared by too few are left to the sequences, which then repeat them for attention only.
    """
    from_here = np.zeros(len(tree.lengths), dtype=np.int64)
    found: list[Stretch] = []
    todo = [(0, len(tree.lengths), 0)]  # sequences first .. last - 1, which all read stretches up to a position
    while todo:
        first, last, position = todo.pop()
        if last - first < 2:
            continue
        shared = tree.shared[first + 1 : last]
        depth = int(shared.min())
        readers = slice(int(tree.begin[first + 1]), int(tree.begin[last]))
        if readers.stop > readers.start and (depth - position) * (last - first - 1) >= WORTH_TOKENS:
            path = places[int(tree.first[first]) + position : int(tree.first[first]) + depth]
            found += [Stretch(keys, readers) for keys in _runs(path)]
            from_here[first + 1 : last] = position = depth
        cuts = first + 1 + np.flatnonzero(shared == depth)
        todo += [(a, b, position) for a, b in pairwise([first, *cuts.tolist(), last])]
    return from_here, found


def _runs(path: np.ndarray) -> list[slice]:
    """The path [n] as slices of consecutive places."""
    cuts = np.flatnonzero(np.diff(path) != 1) + 1
    return [slice(int(path[a]), int(path[b - 1]) + 1) for a, b in pairwise([0, *cuts.tolist(), len(path)])]
