"""Several optimizer steps on one batch: how it is cut, and what is known of its tokens before the first of them.

    batch ─► what is known of it all (reference, advantages, proximal logprobs) ─► epochs ─► minibatches: an update each

A minibatch holds whole groups, so that siblings and branches stay together. Which ones depends on the seed of the run,
the step and the epoch alone: a resumed run cuts a batch as the interrupted one did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from astraflow.models.scoring.packing import Pack, TokenRows, pack_rows
from astraflow.training.parallel.division import divided


class PlacedPacks(NamedTuple):
    """Packs, for each the places [N] of its targets in the flat columns of the rows that it is made of, and the team of
    ranks that computes it."""

    packs: list[Pack]
    places: list[np.ndarray]
    owners: list[int]


def placed_packs(
    rows: TokenRows, tokens_per_microbatch: int, select: np.ndarray | None = None, *, groups: np.ndarray | None = None,
    num_teams: int = 1,
) -> PlacedPacks:  # fmt: skip
    """As `pack_rows`, with places; each team's rows by themselves. `groups`: as of `divided`."""
    numbered = replace(rows, versions=np.arange(len(rows.versions)))
    found = [
        (team, pack)
        for team, part in enumerate(divided(rows, groups, num_teams, select))
        for pack in pack_rows(numbered, tokens_per_microbatch, part)
    ]
    places = [pack.versions for _, pack in found]
    packs = [replace(pack, versions=rows.versions[at]) for (_, pack), at in zip(found, places, strict=True)]
    return PlacedPacks(packs, places, [team for team, _ in found])


def groups_of(table: pa.Table) -> np.ndarray:
    """[R] int64: rows of one group have the same number."""
    return np.asarray(table.column("group_id").combine_chunks().dictionary_encode().indices.to_numpy(), np.int64)


def with_facts(rows: TokenRows, placed: PlacedPacks, packs: Sequence[Pack]) -> TokenRows:
    """The rows with the advantages and reference logprobs of `packs`, which were made of `placed.packs`."""
    advantages, reference = rows.advantages.copy(), None
    if any(pack.ref_logprobs is not None for pack in packs):
        reference = np.full(len(rows.advantages), np.nan, np.float32)
    for pack, places in zip(packs, placed.places, strict=True):
        advantages[places] = pack.advantages
        if reference is not None:
            reference[places] = pack.ref_logprobs
    return replace(rows, advantages=advantages, ref_logprobs=reference)


def spread(placed: PlacedPacks, values: Sequence[np.ndarray], size: int) -> np.ndarray:
    """[size] float32 of values [N] for each pack; NaN where nothing is trained."""
    flat = np.full(size, np.nan, np.float32)
    for own, places in zip(values, placed.places, strict=True):
        flat[places] = own
    return flat


def selections(
    rows: TokenRows, groups: np.ndarray, epochs: int, count: int, seed: Sequence[int]
) -> Iterator[np.ndarray]:
    """Row numbers of each update, epoch by epoch: every row that is trained is in one minibatch of each epoch.

    Groups are shuffled and dealt out one by one, so that minibatches differ by one group at most; a batch of fewer
    groups than `count` has as many minibatches as groups.
    Args: groups: [R] as `groups_of`. seed: of this batch.
    """
    row_of = np.repeat(np.arange(len(rows.weights)), np.diff(rows.starts))
    counts = np.bincount(row_of[rows.trained], minlength=len(rows.weights))
    trained = np.flatnonzero((counts > 0) & (rows.weights > 0))
    names, members = np.unique(groups[trained], return_inverse=True)
    count = min(count, len(names))
    for epoch in range(epochs if count else 0):
        hand = np.empty(len(names), np.int64)
        hand[np.random.default_rng((*seed, epoch)).permutation(len(names))] = np.arange(len(names)) % count
        for i in range(count):
            yield trained[hand[members] == i]
