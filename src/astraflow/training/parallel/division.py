"""Which team of ranks computes what of a batch: by tokens, siblings together where the balance allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from astraflow.models.scoring.packing import Pack, TokenRows
from astraflow.training.parallel.ranks import Ranks

MAX_EXCESS = 1.1  # of the fullest rank over the mean; above it siblings part, and their common prompt is computed twice


def divided(rows: TokenRows, groups: np.ndarray | None, num_teams: int, select: np.ndarray | None) -> list[np.ndarray]:
    """Row numbers (of `select`, default all) for each team of ranks; the same on every rank.

    Args: groups: [R] rows that have a prompt in common, by number; None: not known.
    """
    row_of = np.repeat(np.arange(len(rows.weights)), np.diff(rows.starts))
    chosen = np.arange(len(rows.weights)) if select is None else np.asarray(select)
    if num_teams == 1:
        return [chosen]
    costs = np.zeros(len(rows.weights), np.int64)
    trained = np.flatnonzero(rows.trained & (rows.weights > 0)[row_of])
    np.maximum.at(costs, row_of[trained], trained + 1 - rows.starts[row_of[trained]])
    units = np.arange(len(chosen))
    if groups is not None:
        together = np.unique(groups[chosen], return_inverse=True)[1]
        of_units = np.bincount(together, costs[chosen])
        loads = np.bincount(_dealt(of_units, num_teams), of_units, num_teams)
        if loads.max(initial=0) <= MAX_EXCESS * loads.mean():
            units = together
    team_of = _dealt(np.bincount(units, costs[chosen]), num_teams)[units]
    return [chosen[team_of == team] for team in range(num_teams)]


def _dealt(costs: np.ndarray, num_parts: int) -> np.ndarray:
    """[U] part of each unit: the dearest first, each to the part that has the least so far."""
    part_of, loads = np.zeros(len(costs), np.int64), np.zeros(num_parts)
    for unit in np.argsort(-costs, kind="stable").tolist():
        part = int(loads.argmin())
        part_of[unit] = part
        loads[part] += costs[unit]
    return part_of


def turns(owners: Sequence[int], packs: Sequence[Pack], ranks: Ranks) -> Iterator[tuple[int, bool]]:
    """The numbers of the packs of this rank's team, and False for those that it computes for company only.

    A pass is done by all ranks together, so each makes as many as the one that has most: with a small pack again, whose
    result counts nothing.
    """
    own = [i for i, owner in enumerate(owners) if owner == ranks.team]
    yield from ((i, True) for i in own)
    most = max(np.bincount(owners, minlength=ranks.size)) if packs else 0
    if len(own) < most:
        small = min(range(len(packs)), key=lambda i: packs[i].num_computed)
        yield from ((small, False) for _ in range(most - len(own)))


def scored(
    owners: Sequence[int], packs: Sequence[Pack], score: Callable[[Pack], torch.Tensor], ranks: Ranks
) -> list[np.ndarray]:
    """What `score` gives for the targets of each pack: [N] float32, on every rank, each computed by its owner."""
    if not ranks.many:
        return [score(pack).cpu().numpy() for pack in packs]
    found = {i: score(packs[i]).cpu() if counts else score(packs[i]) for i, counts in turns(owners, packs, ranks)}
    flat = torch.cat(
        [
            found[i].float() if ranks.speaks and owners[i] == ranks.team else torch.zeros(p.num_targets)
            for i, p in enumerate(packs)
        ]
    )
    sizes = [pack.num_targets for pack in packs]
    return [part.numpy() for part in torch.split(ranks.sum(flat), sizes)]
