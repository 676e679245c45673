"""Who computes what: every row once, ranks that have as much to do, siblings together where that is fair."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.models.scoring.packing import rows_from_lists
from astraflow.training.optimize.minibatches import placed_packs
from astraflow.training.parallel.division import MAX_EXCESS, divided, scored, turns
from astraflow.training.parallel.ranks import ALONE, Ranks


def _rows(lengths, seed=0):
    draw = np.random.default_rng(seed)
    return rows_from_lists([(draw.integers(3, 9, n), np.arange(n) > 0) for n in lengths])


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 5))
def test_every_row_has_one_rank_and_none_has_much_more_than_its_share(lengths, num_ranks, group_size):
    rows = _rows(lengths)
    groups = None if not group_size else np.arange(len(lengths)) // group_size
    parts = divided(rows, groups, num_ranks, None)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) <= max(MAX_EXCESS * sum(lengths) / num_ranks, sum(lengths) / num_ranks + max(lengths))


def test_siblings_stay_together_unless_a_rank_would_wait_for_them():
    groups = np.repeat(np.arange(4), 4)
    even = divided(_rows([10] * 16), groups, 2, None)
    assert all(len(set(groups[part])) == 2 and len(part) == 8 for part in even)
    uneven = divided(_rows([50] * 4 + [5] * 12), groups, 2, None)
    loads = [sum(50 if i < 4 else 5 for i in part) for part in uneven]
    assert max(loads) <= 1.1 * sum(loads) / 2 and {*groups[uneven[0]]} & {*groups[uneven[1]]}


def test_only_what_is_selected_and_trained_counts():
    rows = _rows([40, 4, 4, 4, 40])
    rows.weights[0] = 0
    parts = divided(rows, None, 2, np.array([0, 1, 2, 3]))
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3]
    assert sorted(sum(i > 0 for i in part) for part in parts) == [1, 2], "the row of weight 0 costs nothing"


def test_a_rank_with_less_to_do_keeps_others_company():
    placed = placed_packs(_rows([30, 4, 4, 4]), 16, num_teams=3)
    listed = [list(turns(placed.owners, placed.packs, Ranks(rank, 3))) for rank in range(3)]
    assert len({len(own) for own in listed}) == 1, "all make as many passes"
    counted = sorted(i for own in listed for i, counts in own if counts)
    assert counted == list(range(len(placed.packs)))
    for own in listed:
        assert all(placed.packs[i].num_tokens <= 8 for i, counts in own if not counts), "with a small pack"
    assert list(turns([], [], Ranks(1, 3))) == []


def test_one_rank_makes_the_packs_as_without_ranks():
    rows = _rows([30, 4, 4, 4])
    placed = placed_packs(rows, 16)
    assert placed.owners == [0] * len(placed.packs)
    assert [i for i, counts in turns(placed.owners, placed.packs, ALONE) if counts] == list(range(len(placed.packs)))
    values = scored(placed.owners, placed.packs, lambda pack: torch.from_numpy(pack.target_ids).float(), ALONE)
    assert all((v == p.target_ids).all() for v, p in zip(values, placed.packs, strict=True))
