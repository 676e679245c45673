"""What sequences have in common from their first token on, so that a pack computes it once.

Siblings of a group share their prompt, forks of an episode the way to the fork, and often they share sampled tokens
too. Sorted by their ids, sequences with a common start are neighbours; a tree of tokens then takes one pass:

    7 1 4 9        computed tokens: 7 1 4 9 | 5 | 2 2
    7 1 5          its sequences:   0 1 2 3,  0 1 4,  5 6
    2 2

Everything in a decoder but attention looks at one token at a time; attention reads the tree (models/scoring/trees).
"""

from __future__ import annotations

import numpy as np

from astraflow.models.scoring.offsets import offsets, ramps

JOIN = (
    8  # neighbours stay together when 1 / JOIN of the later one is shared: a common first token is not worth a gather
)
_BLOCK_TOKENS = 1 << 20  # compared at once: bounds memory


def sort_by_ids(token_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The order [S] that makes neighbours of sequences with a common start. `token_ids`: flat int32 >= 0."""
    flat = memoryview(token_ids.astype(">i4").tobytes())  # as bytes, big-endian numbers compare like the numbers
    keys = [
        bytes(flat[4 * start : 4 * (start + n)]) for start, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def shared_with_previous(token_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[S] int64: with how many tokens of the sequence before it each one begins; 0 for the first."""
    both = np.minimum(lengths[1:], lengths[:-1])
    ends = offsets(both)
    shared = np.zeros(len(lengths), dtype=np.int64)
    first = 0
    while first < len(both):
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _BLOCK_TOKENS, "right")) - 1)
        shared[first + 1 : last + 1] = _common(token_ids, starts[first : last + 1], both[first:last])
        first = last
    return shared


def _common(token_ids: np.ndarray, starts: np.ndarray, both: np.ndarray) -> np.ndarray:
    """The same of the sequences from the second on, of which `both` [S - 1] tokens can be compared."""
    step = ramps(both)
    differs = token_ids[np.repeat(starts[1:], both) + step] != token_ids[np.repeat(starts[:-1], both) + step]
    never = np.iinfo(np.int64).max
    until = np.append(np.where(differs, step, never), never)
    first = np.minimum.reduceat(until, offsets(both)[:-1])
    return np.where(both > 0, np.minimum(first, both), 0)


def joined(shared: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[S] bool: the sequence has enough in common with the one before it."""
    return JOIN * shared >= lengths


def clusters(shared: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[slice], np.ndarray]:
    """Runs of sorted sequences that belong into one pack, and the computed tokens of each.

    A run that would be too large is cut, and what its parts share is then computed once in each.
    Args: shared: [S] as `shared_with_previous` says. capacity: computed tokens that a run may have; a longer sequence
        is a run of its own.
    """
    own, alone = (lengths - shared).tolist(), lengths.tolist()
    follows = joined(shared, lengths).tolist()
    runs: list[slice] = []
    totals: list[int] = []
    for place, tokens in enumerate(own):
        if follows[place] and totals[-1] + tokens <= capacity:
            runs[-1] = slice(runs[-1].start, place + 1)
            totals[-1] += tokens
        else:
            runs.append(slice(place, place + 1))
            totals.append(alone[place])
    return runs, np.array(totals, dtype=np.int64)


def tree_places(shared: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[T] int64: for each position of each sorted sequence its place among the computed tokens, which lie in the order
    of the sequences, each with what it does not share."""
    ends = offsets(lengths).tolist()
    begin = offsets(lengths - shared).tolist()
    places = np.empty(ends[-1], dtype=np.int64)
    path = np.empty(int(lengths.max(initial=0)), dtype=np.int64)  # of the sequence at hand, over that of the one before
    for i, (common, length) in enumerate(zip(shared.tolist(), lengths.tolist(), strict=True)):
        path[common:length] = np.arange(begin[i], begin[i + 1])
        places[ends[i] : ends[i + 1]] = path[:length]
    return places
