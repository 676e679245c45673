"""Rows to packs: nothing is lost, nothing moves, forks get their prefix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import astraflow.models.scoring.trees.prefixes as prefixes
from astraflow.errors import TrainingError
from astraflow.models.scoring.packing import pack_rows, rows_from_lists, rows_from_table

MARKER = np.float32(-7.25)


def _targets(packs, rows):
    """{(row, position in the row): (id, logprob, advantage, version)} of all targets."""
    found = {}
    for pack in packs:
        starts = pack.cu_lengths[pack.target_sequence]
        places = np.arange(pack.num_tokens) if pack.places is None else pack.places
        for n in range(pack.num_targets):
            row = int(pack.rows[pack.target_sequence[n]])
            position = int(pack.position_ids[pack.target_index[n]]) + 1
            context = places[starts[n] : starts[n] + position]
            assert (row, position) not in found, "a token is trained twice"
            found[row, position] = (
                int(pack.target_ids[n]), float(pack.behavior_logprobs[n]), float(pack.advantages[n]),
                int(pack.versions[n]),
            )  # fmt: skip
            first = int(rows.starts[row])
            assert context[-1] == pack.target_index[n], "a token is trained at another place of its sequence"
            assert (pack.token_ids[context] == rows.token_ids[first : first + position]).all(), "a context changed"
            assert (pack.position_ids[context] == np.arange(position)).all()
    return found


def _paths(pack):
    """The places that lead to each position of each sequence."""
    for start, stop in itertools.pairwise(pack.cu_lengths):
        yield from (pack.places[start : end + 1] for end in range(start, stop))


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
    budget=st.sampled_from([1, 16, 64, 10_000]),
    different=st.sampled_from([1, 2, 60]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_sampled_token_is_the_target_of_exactly_one_pack(
    make_table, random_rows, lengths, seed, budget, different
):
    generator = np.random.default_rng(seed)
    listed = [(ids % different, mask) for ids, mask in random_rows(lengths, seed)]  # few ids: much is shared
    draws = [generator.random(length).astype(np.float32) for length in lengths]
    versions = [generator.integers(0, 9, length).astype(np.int32) for length in lengths]
    table = make_table(listed, behavior_logprobs=draws, advantages=draws[::1], versions=versions)
    rows = rows_from_table(table)
    packs = pack_rows(rows, budget)
    expected = {
        (row, position): (int(ids[position]), draws[row][position], draws[row][position], versions[row][position])
        for row, (ids, mask) in enumerate(listed)
        for position in np.flatnonzero(mask)
    }
    assert _targets(packs, rows) == expected
    for pack in packs:
        lengths_here = np.diff(pack.cu_lengths)
        assert pack.num_computed <= budget or len(lengths_here) == 1
        assert (np.diff(lengths_here) <= 0).all(), "longest first"
        if pack.places is not None:
            assert set(pack.places.tolist()) == set(range(pack.num_computed)), "nothing is computed for nobody"
            assert pack.num_computed < pack.num_tokens
            paths = {tuple(pack.token_ids[path]) for path in _paths(pack)}
            assert len(paths) == pack.num_computed, "what is equal is computed once"


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=20), seed=st.integers(0, 100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_order_of_the_rows_does_not_change_the_sizes_of_the_packs(random_rows, lengths, seed):
    rows = random_rows(lengths, seed)
    turned = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    sizes = [sorted(tuple(np.diff(p.cu_lengths)) for p in pack_rows(rows_from_lists(r), 64)) for r in (rows, turned)]
    assert sizes[0] == sizes[1]


def test_a_prompt_is_computed_once_for_all_siblings_in_one_pack(make_table):
    prompt = list(range(100, 140))
    rows = [([*prompt, 3 + i, 60 - i], [0] * 40 + [1, 1]) for i in range(8)]
    packs = pack_rows(rows_from_table(make_table(rows)), 43)
    assert [(len(p.rows), p.num_computed, p.num_tokens) for p in packs] == [(3, 43, 123), (3, 43, 123), (2, 42, 82)]
    (pack,) = pack_rows(rows_from_table(make_table(rows)), 1000)
    assert (pack.num_computed, pack.num_tokens) == (48, 328)


def test_a_fork_computes_only_its_own_tokens(make_table):
    rows = [([*range(50, 80), 3, 4], [0] * 30 + [1, 1]), ([5, 6, 7], [0, 1, 1])]
    (pack,) = pack_rows(
        rows_from_table(make_table(rows, episode_id=["a", "a"], branch=[0, 1], parent_branch=[-1, 0], fork_at=[0, 31])),
        1000,
    )
    assert pack.num_computed == 31 + 2 and pack.num_tokens == 31 + 33  # the last token of each is a target only


def test_sequences_with_little_in_common_lie_end_to_end(make_table):
    rows = [([1, *range(20 * i + 10, 20 * i + 28)], [0] * 9 + [1] * 10) for i in range(5)]
    (pack,) = pack_rows(rows_from_table(make_table(rows)), 1000)
    assert pack.places is None and pack.num_computed == pack.num_tokens == 90


def test_a_marker_stays_on_its_token(make_table, random_rows):
    listed = random_rows([9, 14, 5])
    logprobs = [np.where(mask, -1.0, 0.0).astype(np.float32) for _, mask in listed]
    position = int(np.flatnonzero(listed[1][1])[2])
    logprobs[1][position] = MARKER
    rows = rows_from_table(make_table(listed, behavior_logprobs=logprobs))
    (pack,) = pack_rows(rows, 1000)
    (marked,) = np.flatnonzero(pack.behavior_logprobs == MARKER)
    assert pack.rows[pack.target_sequence[marked]] == 1
    assert pack.target_ids[marked] == listed[1][0][position]
    assert pack.token_ids[pack.target_index[marked]] == listed[1][0][position - 1]


def test_a_fork_gets_its_parents_prefix_and_trains_only_its_own_tokens(make_table):
    rows = [([1, 10, 11, 12, 13], [0, 0, 1, 1, 1]), ([20, 21], [0, 1]), ([30], [1]), ([40, 41], [0, 1])]
    table = make_table(
        rows,
        episode_id=["a", "a", "a", "b"],
        branch=[0, 1, 2, 0],
        parent_branch=[-1, 0, 1, -1],
        fork_at=[0, 3, 4, 0],
    )
    flat = rows_from_table(table)
    paths = [flat.token_ids[a:b].tolist() for a, b in zip(flat.starts[:-1], flat.starts[1:], strict=True)]
    assert paths == [[1, 10, 11, 12, 13], [1, 10, 11, 20, 21], [1, 10, 11, 20, 30], [40, 41]]
    trained = [flat.trained[a:b].tolist() for a, b in zip(flat.starts[:-1], flat.starts[1:], strict=True)]
    assert trained == [[False, False, True, True, True], [False] * 4 + [True], [False] * 4 + [True], [False, True]]


def test_a_fork_may_start_inside_its_grandparent(make_table):
    rows = [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6], [0, 1]), ([7], [1])]
    table = make_table(rows, episode_id=["a"] * 3, branch=[0, 1, 2], parent_branch=[-1, 0, 1], fork_at=[0, 4, 2])
    flat = rows_from_table(table)
    assert flat.token_ids[flat.starts[2] :].tolist() == [1, 2, 7]


@pytest.mark.parametrize(
    ("parents", "forks", "message"),
    [([-1, 5], [0, 1], "not in the batch"), ([-1, 0], [0, 9], "behind the end"), ([1, 0], [0, 0], "back to itself")],
)
def test_a_broken_tree_is_named(make_table, parents, forks, message):
    rows = [([1, 2], [0, 1]), ([3, 4], [0, 1])]
    table = make_table(rows, episode_id=["a", "a"], branch=[0, 1], parent_branch=parents, fork_at=forks)
    with pytest.raises(TrainingError, match=message):
        rows_from_table(table)


def test_a_sampled_token_without_context_is_named():
    with pytest.raises(TrainingError, match=r"rows\[1\].loss_mask\[0\]"):
        pack_rows(rows_from_lists([([1, 2], [False, True]), ([3, 4], [True, True])]), 100)


def test_rows_of_weight_zero_and_rows_without_samples_are_left_out(make_table):
    rows = [([1, 2], [0, 1]), ([3, 4], [0, 1]), ([5, 6], [0, 0])]
    flat = rows_from_table(make_table(rows, weight=[0.0, 1.0, 1.0]))
    (pack,) = pack_rows(flat, 100)
    assert pack.rows.tolist() == [1] and pack.target_ids.tolist() == [4]
    assert pack_rows(rows_from_table(make_table(rows[2:])), 100) == []


def test_chunked_and_sliced_tables_read_like_whole_ones(make_table, random_rows):
    import pyarrow as pa

    table = make_table(random_rows([6, 9, 7, 12]))
    pieces = pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])
    whole, cut = rows_from_table(table), rows_from_table(pieces)
    assert all((getattr(whole, n) == getattr(cut, n)).all() for n in ("starts", "token_ids", "trained", "advantages"))


@given(seed=st.integers(0, 99), block=st.sampled_from([1, 7, 1 << 20]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_neighbours_share_is_counted_in_blocks_as_at_once(seed, block):
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 2, draw.integers(0, 9)).astype(np.int32) for _ in range(12)]
    ids, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_BLOCK_TOKENS", block)
        shared = prefixes.shared_with_previous(ids, np.cumsum(lengths) - lengths, lengths)
    for before, row, count in zip(rows, rows[1:], shared[1:].tolist(), strict=False):
        assert (before[:count] == row[:count]).all() and (
            count == min(len(before), len(row)) or before[count] != row[count]
        )
    assert shared[0] == 0
