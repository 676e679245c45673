"""From the rows of a batch to packed microbatches: flat arrays and offsets, no padding, no per-token Python.

- row: prompt and sampled tokens of one branch; a fork gets its parent's prefix in front, masked out
- sequence: a row cut just before its last trained token: that token is a target, never an input
- pack: sequences longest first, at most `tokens_per_microbatch` (or one longer sequence); what they have in common from
  their start on is there once (models/scoring/trees/prefixes.py) where that is worth it
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from astraflow.errors import TrainingError
from astraflow.models.scoring.offsets import offsets, ramps
from astraflow.models.scoring.trees.prefixes import (
    clusters,
    joined,
    shared_with_previous,
    sort_by_ids,
    tree_places,
)
from astraflow.wire.codec import flat_values, list_lengths


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows as flat arrays: row r owns `starts[r]:starts[r + 1]` of each [T] array."""

    starts: np.ndarray  # [R + 1] int64
    token_ids: np.ndarray  # [T] int32
    trained: np.ndarray  # [T] bool: the token was sampled and is trained
    behavior_logprobs: np.ndarray  # [T] float32
    advantages: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32, -1 where not sampled
    weights: np.ndarray  # [R] float32 >= 0; a row of weight 0 is not trained
    places: np.ndarray | None = None  # [T] int64 into the flat columns of the table; None: in their order
    ref_logprobs: np.ndarray | None = None  # [T] float32 of a stage; None: not given to every row
    engines: np.ndarray | None = None  # [R] str, the engine that sampled a row; "" and None: not known


@dataclass(frozen=True, slots=True)
class Pack:
    """One microbatch: S sequences (T positions), longest first, of U computed tokens, and their N trained tokens."""

    token_ids: np.ndarray  # [U] int64 inputs
    position_ids: np.ndarray  # [U] int64, from 0 in each sequence
    cu_lengths: np.ndarray  # [S + 1] int32 offsets into [T]
    places: np.ndarray | None  # [T] int64 into [U]; None: nothing is shared, U = T and the sequences lie end to end
    rows: np.ndarray  # [S] int64 row of the batch
    target_index: np.ndarray  # [N] int64 into [U]: the token whose next one is trained
    target_ids: np.ndarray  # [N] int64 that next token
    target_sequence: np.ndarray  # [N] int64 into [S]
    behavior_logprobs: np.ndarray  # [N] float32
    advantages: np.ndarray  # [N] float32
    weights: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int32
    ref_logprobs: np.ndarray | None = None  # [N] float32; None: not known
    engines: np.ndarray | None = None  # [S] str; None: not known

    @property
    def num_targets(self) -> int:
        """N, the trained tokens."""
        return len(self.target_ids)

    @property
    def num_tokens(self) -> int:
        """T, the input tokens of all sequences."""
        return int(self.cu_lengths[-1])

    @property
    def num_computed(self) -> int:
        """U, the input tokens that go through the model."""
        return len(self.token_ids)


def rows_from_table(table: pa.Table) -> TokenRows:
    """The rows of a batch (columns of `TRAINING_SCHEMA`), forks expanded to their whole token path.

    Raises: TrainingError: a fork whose parent is not in the batch, or that starts behind its parent's end.
    """
    lengths = list_lengths(table.column("token_ids")).astype(np.int64)
    rows = TokenRows(
        starts=offsets(lengths),
        token_ids=flat_values(table.column("token_ids")),
        trained=flat_values(table.column("loss_mask")),
        behavior_logprobs=flat_values(table.column("behavior_logprobs")),
        advantages=flat_values(table.column("advantages")),
        versions=flat_values(table.column("versions")),
        weights=table.column("weight").to_numpy(),
        ref_logprobs=_ref_logprobs(table),
        engines=_engines(table),
    )
    parents = table.column("parent_branch").to_numpy()
    return rows if (parents < 0).all() else _expand_forks(table, rows, parents)


def _ref_logprobs(table: pa.Table) -> np.ndarray | None:
    if "ref_logprobs" not in table.column_names or table.column("ref_logprobs").null_count:
        return None
    return flat_values(table.column("ref_logprobs"))


def _engines(table: pa.Table) -> np.ndarray | None:
    """Without the node, which is behind the engine's name."""
    if "engine" not in table.column_names:
        return None
    names = np.array([name.partition("@")[0] for name in table.column("engine").to_pylist()], np.str_)
    return names if names.astype(bool).any() else None


def rows_to_score(table: pa.Table) -> TokenRows:
    """Every sampled token of the rows of whole episodes, forks expanded. `versions` holds the place of each token in
    the flat column `token_ids`, so that what is computed for a target finds its way back.

    Args: table: with the columns `episode_id`, `branch`, `parent_branch`, `fork_at`, `token_ids`, `loss_mask`.
    Raises: TrainingError: as `rows_from_table`.
    """
    lengths = list_lengths(table.column("token_ids")).astype(np.int64)
    size = int(lengths.sum())
    rows = TokenRows(
        starts=offsets(lengths),
        token_ids=flat_values(table.column("token_ids")),
        trained=flat_values(table.column("loss_mask")),
        behavior_logprobs=np.zeros(size, dtype=np.float32),
        advantages=np.zeros(size, dtype=np.float32),
        versions=np.arange(size, dtype=np.int32),
        weights=np.ones(len(lengths), dtype=np.float32),
    )
    parents = table.column("parent_branch").to_numpy()
    return rows if (parents < 0).all() else _expand_forks(table, rows, parents)


def rows_from_lists(examples: list[tuple[np.ndarray, np.ndarray]]) -> TokenRows:
    """Rows of ([T] int ids, [T] bool: trained), no reinforcement columns: logprobs 0, advantages 1, weights 1."""
    starts = offsets(np.array([len(ids) for ids, _ in examples], dtype=np.int64))
    size = int(starts[-1])
    return TokenRows(
        starts=starts,
        token_ids=np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in examples]),
        trained=np.concatenate([np.asarray(mask, dtype=bool) for _, mask in examples]),
        behavior_logprobs=np.zeros(size, dtype=np.float32),
        advantages=np.ones(size, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        weights=np.ones(len(examples), dtype=np.float32),
    )


def pack_rows(rows: TokenRows, tokens_per_microbatch: int, select: np.ndarray | None = None) -> list[Pack]:
    """Pack the trained part of the rows (of `select`: [n] row numbers, default all), first fit, longest first.

    Every trained token is the target of exactly one pack. Rows without trained tokens are left out.
    Raises: TrainingError: a trained token with nothing before it.
    """
    # Where the targets are: flat index, its row, and the number of targets and the last one of each row.
    row_of = np.repeat(np.arange(len(rows.weights)), np.diff(rows.starts))
    trained = rows.trained & (rows.weights > 0)[row_of]
    if select is not None:
        chosen = np.zeros(len(rows.weights), dtype=bool)
        chosen[select] = True
        trained &= chosen[row_of]
    where = np.flatnonzero(trained)
    if len(where) == 0:
        return []
    counts = np.bincount(row_of[where], minlength=len(rows.weights))
    kept = np.flatnonzero(counts)
    last = where[np.cumsum(counts[kept]) - 1]
    inputs = last - rows.starts[kept]  # inputs of a sequence: everything before its last target
    first = where[offsets(counts[kept])[:-1]]
    if (first == rows.starts[kept]).any():
        row = int(kept[np.argmax(first == rows.starts[kept])])
        raise TrainingError(
            f"batch.rows[{row}].loss_mask[0]", True, "marks a token that has no context", "sample after a prompt"
        )
    sequences = _Sequences(kept, inputs, counts[kept], offsets(counts)[kept])
    return [
        _one_pack(rows, where, sequences.take(members))
        for members in _bins(rows.token_ids, rows.starts[kept], inputs, tokens_per_microbatch)
    ]


class _Sequences(NamedTuple):
    """Rows to be trained, each [S] int64."""

    rows: np.ndarray
    inputs: np.ndarray  # tokens of each
    counts: np.ndarray  # targets of each
    first: np.ndarray  # number of its first target among all

    def take(self, members: np.ndarray) -> _Sequences:
        return _Sequences(*(column[members] for column in self))


def _bins(token_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Which sequences share a pack, first fit decreasing over runs of sequences with a common start; sorted by ids."""
    order = sort_by_ids(token_ids, starts, lengths)
    shared = shared_with_previous(token_ids, starts[order], lengths[order])
    runs, tokens = clusters(shared, lengths[order], capacity)
    chosen, bounds = first_fit(tokens, capacity)
    return [
        order[np.concatenate([np.arange(runs[i].start, runs[i].stop) for i in np.sort(chosen[a:b])])]
        for a, b in pairwise(bounds)
    ]


def _one_pack(rows: TokenRows, where: np.ndarray, members: _Sequences) -> Pack:
    """Lay out sequences that are sorted by their ids. `where`: [N] flat places of all targets."""
    starts, lengths = rows.starts[members.rows], members.inputs
    shared = shared_with_previous(rows.token_ids, starts, lengths)
    longest_first = np.argsort(-lengths, kind="stable")
    places = None
    if not joined(shared, lengths).any():
        source = np.repeat(starts[longest_first], lengths[longest_first])
        position_ids = ramps(lengths[longest_first])
    else:
        position_ids = ramps(lengths - shared) + np.repeat(shared, lengths - shared)
        source = np.repeat(starts, lengths - shared)
        in_order = np.repeat(offsets(lengths)[longest_first], lengths[longest_first]) + ramps(lengths[longest_first])
        places = tree_places(shared, lengths)[in_order]
    kept, inputs, counts, first = members.take(longest_first)
    cu_lengths = offsets(inputs)
    targets = where[np.repeat(first, counts) + ramps(counts)]
    sequence = np.repeat(np.arange(len(kept)), counts)
    before = targets - 1 - rows.starts[kept][sequence] + cu_lengths[sequence]
    return Pack(
        token_ids=rows.token_ids[source + position_ids].astype(np.int64),
        position_ids=position_ids,
        cu_lengths=cu_lengths.astype(np.int32),
        places=places,
        rows=kept,
        target_index=before if places is None else places[before],
        target_ids=rows.token_ids[targets].astype(np.int64),
        target_sequence=sequence,
        behavior_logprobs=rows.behavior_logprobs[targets],
        advantages=rows.advantages[targets],
        weights=rows.weights[kept][sequence],
        versions=rows.versions[targets],
        ref_logprobs=None if rows.ref_logprobs is None else rows.ref_logprobs[targets],
        engines=None if rows.engines is None else rows.engines[kept],
    )


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, list[int]]:
    """First fit decreasing of [S] lengths in tokens: the order [S] of the sequences, bin by bin, and where each bin
    starts (and the last ends)."""
    decreasing = np.argsort(-lengths, kind="stable")
    smallest = int(lengths.min())
    bins: list[list[int]] = []
    room: list[int] = []
    first_open = 0  # bins before this one cannot take even the smallest sequence
    for index, length in zip(decreasing.tolist(), lengths[decreasing].tolist(), strict=True):
        place = first_open
        while place < len(bins) and room[place] < length:
            place += 1
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
        while first_open < len(bins) and room[first_open] < smallest:
            first_open += 1
    order = np.array([index for members in bins for index in members])
    return order, np.cumsum([0, *(len(members) for members in bins)]).tolist()


def _expand_forks(table: pa.Table, rows: TokenRows, parents: np.ndarray) -> TokenRows:
    """Put each fork's shared prefix in front of it, untrained: every row becomes a list of flat segments."""
    episodes = table.column("episode_id").to_pylist()
    branches = table.column("branch").to_numpy().tolist()
    forks_at = table.column("fork_at").to_numpy().tolist()
    row_of = {key: row for row, key in enumerate(zip(episodes, branches, strict=True))}
    parent_of = [
        -1 if parent < 0 else row_of.get((episode, parent), -2)
        for episode, parent in zip(episodes, parents.tolist(), strict=True)
    ]
    if -2 in parent_of:
        row = parent_of.index(-2)
        raise TrainingError(
            f"batch.rows[{row}].parent_branch", int(parents[row]), f"is not in the batch (episode {episodes[row]})",
            "send all branches of an episode and policy in one batch",
        )  # fmt: skip
    segments: list[tuple[int, int]] = []  # (start, stop) in the flat arrays; the last one of a row is its own
    num_segments = []
    for row in range(len(episodes)):
        path = _path(row, rows.starts, parent_of, forks_at)
        segments.extend(path)
        num_segments.append(len(path))
    start, stop = np.array(segments, dtype=np.int64).T
    sizes = stop - start
    source = np.repeat(start, sizes) + ramps(sizes)
    own = np.zeros(len(sizes), dtype=bool)
    own[np.cumsum(num_segments) - 1] = True
    return TokenRows(
        starts=offsets(sizes)[offsets(np.array(num_segments))],
        token_ids=rows.token_ids[source],
        trained=rows.trained[source] & np.repeat(own, sizes),
        behavior_logprobs=rows.behavior_logprobs[source],
        advantages=rows.advantages[source],
        versions=rows.versions[source],
        weights=rows.weights,
        places=source,
        ref_logprobs=None if rows.ref_logprobs is None else rows.ref_logprobs[source],
        engines=rows.engines,
    )


def _path(row: int, starts: np.ndarray, parent_of: list[int], forks_at: list[int]) -> list[tuple[int, int]]:
    """The flat segments whose concatenation is the whole token path of `row`, from the root to its own tokens."""
    chain = [row]
    while parent_of[chain[-1]] >= 0:
        chain.append(parent_of[chain[-1]])
        if len(chain) > len(parent_of):
            raise TrainingError(
                f"batch.rows[{row}].parent_branch", chain[1], "leads back to itself", "send a tree of branches"
            )
    path: list[tuple[int, int]] = []
    length = 0
    for member in reversed(chain):
        keep = forks_at[member]
        if keep > length:
            raise TrainingError(
                f"batch.rows[{row}].fork_at", keep, f"is behind the end of its parent ({length} tokens)",
                "fork inside the parent's token path",
            )  # fmt: skip
        while length > keep:
            start, stop = path.pop()
            length -= stop - start
            if length < keep:
                path.append((start, start + keep - length))
                length = keep
        start, stop = int(starts[member]), int(starts[member + 1])
        path.append((start, stop))
        length += stop - start
    return path
