"""A tree in parts is masked attention: outputs and gradients, in float64, with windows and grouped heads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.models.scoring.layout import TreeLayout, pack_layout
from astraflow.models.scoring.packing import Pack, pack_rows, rows_from_lists
from astraflow.models.scoring.trees.attention import Kernel, TreeAttention
from astraflow.models.scoring.trees.flex import BLOCK, TreeMask, blocks, tree_flex
from astraflow.models.scoring.trees.tokens import depths, stretches, subtree_ends, token_tree


def grown(seed: int, count: int, longest: int = 9, root: int = 20) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sequences that go on from others, somewhere in them; each token is trained."""
    draw = np.random.default_rng(seed)
    found = [draw.integers(0, 50, root)]
    while len(found) < count:
        before = found[draw.integers(len(found))]
        found.append(
            np.concatenate(
                (before[: draw.integers(1, len(before) + 1)], draw.integers(0, 50, draw.integers(1, longest)))
            )
        )
    return [(ids.astype(np.int32), np.arange(len(ids)) > 0) for ids in found]


def ancestors(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """[U, U] bool: which places each place sees; [U] its position."""
    assert pack.places is not None
    seen, position = torch.zeros(pack.num_computed, pack.num_computed, dtype=torch.bool), torch.zeros(pack.num_computed)
    for start, stop in itertools.pairwise(pack.cu_lengths):
        path = pack.places[start:stop]
        for depth, place in enumerate(path):
            seen[place, path[: depth + 1]] = True
            position[place] = depth
    return seen, position


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Plain attention [U, H, D] of a mask [U, U]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / q.shape[2] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def shared_packs(seed: int, count: int, budget: int) -> list[Pack]:
    packs = pack_rows(rows_from_lists(grown(seed, count)), budget)
    return [pack for pack in packs if pack.places is not None]


@pytest.mark.usefixtures("every_stretch")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    seed=st.integers(0, 999), count=st.integers(2, 14), budget=st.sampled_from([30, 60, 10_000]),
    window=st.sampled_from([None, 1, 5, 100]), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)  # fmt: skip
def test_parts_add_up_to_masked_attention_and_its_gradients(
    seed: int, count: int, budget: int, window: int | None, heads: tuple[int, int]
) -> None:
    for pack in shared_packs(seed, count, budget):
        seen, position = ancestors(pack)
        if window is not None:
            seen &= position[:, None] - position < window
        tree = pack_layout(pack.cu_lengths, pack.places, torch.device("cpu"), torch.float64).tree
        assert isinstance(tree, TreeLayout)
        torch.manual_seed(seed)
        inputs = [torch.randn(pack.num_computed, n, 8, dtype=torch.float64) for n in (heads[0], heads[1], heads[1])]
        upstream = torch.randn_like(inputs[0])
        results = []
        for attend in (
            lambda *x, seen=seen: masked(*x, seen),
            lambda *x, tree=tree: TreeAttention.apply(*x, tree, Kernel(None, window)),
        ):
            leaves = [x.clone().requires_grad_() for x in inputs]
            output = attend(*leaves)
            results.append([output.detach(), *torch.autograd.grad((output * upstream).sum(), leaves)])
        for plain, mine in zip(*results, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(seed=st.integers(0, 999), count=st.integers(2, 20), worth=st.sampled_from([1, 8, 40]))
def test_every_key_is_read_exactly_once(seed: int, count: int, worth: int) -> None:
    for pack in shared_packs(seed, count, 10_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("astraflow.models.scoring.trees.tokens.WORTH_TOKENS", worth)
            tree = token_tree(pack.cu_lengths, pack.places)
            from_here, read = stretches(tree, pack.places)
        seen, position = ancestors(pack)
        assert (depths(tree) == position.numpy()).all()
        place = np.arange(pack.num_computed)
        ends = subtree_ends(tree, pack.places)
        assert (((place <= place[:, None]) & (place[:, None] < ends)) == seen.numpy()).all()
        times = np.zeros(seen.shape, dtype=int)
        for stretch in read:
            times[stretch.readers, stretch.keys] += 1
        for i in range(len(tree.lengths)):
            path = pack.places[tree.first[i] : tree.first[i] + tree.lengths[i]]
            for depth in range(int(tree.shared[i]), int(tree.lengths[i])):
                times[path[depth], path[int(from_here[i]) : depth + 1]] += 1
        assert (times == seen.numpy()).all()


def test_a_history_is_copied_for_no_branch() -> None:
    history = np.arange(600, dtype=np.int32) % 50
    rows = [np.concatenate((history, np.full(40, 50 + i, np.int32))) for i in range(4)]
    (pack,) = pack_rows(rows_from_lists([(ids, np.arange(len(ids)) >= 600) for ids in rows]), 10_000)
    tree = pack_layout(pack.cu_lengths, pack.places, torch.device("cpu"), torch.float32).tree
    assert isinstance(tree, TreeLayout)
    assert [(s.keys, s.readers) for s in tree.stretches] == [(slice(0, 600), slice(639, 756))]
    assert len(tree.spread.index) == pack.num_computed == 600 + 4 * 39


def test_short_starts_are_left_to_the_buckets() -> None:
    rows = [np.concatenate((np.arange(9), np.full(6, 20 + i))).astype(np.int32) for i in range(8)]
    (pack,) = pack_rows(rows_from_lists([(ids, np.arange(len(ids)) >= 9) for ids in rows]), 10_000)
    layout = pack_layout(pack.cu_lengths, pack.places, torch.device("cpu"), torch.float32)
    assert pack.places is not None and layout.tree is None and layout.spread is not None


@pytest.mark.usefixtures("every_stretch")
def test_bfloat16_parts_are_rounded_like_the_whole() -> None:
    (pack,) = shared_packs(3, 14, 10_000)
    tree = pack_layout(pack.cu_lengths, pack.places, torch.device("cpu"), torch.bfloat16).tree
    seen, _ = ancestors(pack)
    torch.manual_seed(0)
    inputs = [torch.randn(pack.num_computed, n, 16) for n in (4, 2, 2)]
    half = [x.bfloat16() for x in inputs]
    output = TreeAttention.apply(*half, tree, Kernel(None, None))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), masked(*(x.float() for x in half), seen), rtol=2e-2, atol=2e-2)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 99), root=st.sampled_from([20, 300]))
def test_blocks_are_those_of_the_whole_mask(seed: int, root: int) -> None:
    rows = grown(seed, 12, 90, root)
    for pack in pack_rows(rows_from_lists(rows), 10_000):
        if pack.places is None:
            continue
        seen, _ = ancestors(pack)
        size = -(-pack.num_computed // BLOCK) * BLOCK
        whole = torch.ones(size, size, dtype=torch.bool)  # past the end: no reason to look at single elements
        whole[: pack.num_computed, : pack.num_computed] = seen
        part = torch.zeros(size, size, dtype=torch.bool)
        part[: pack.num_computed, : pack.num_computed] = seen
        cut = [x.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2) for x in (whole, part)]
        some, full = blocks(subtree_ends(token_tree(pack.cu_lengths, pack.places), pack.places))
        assert (torch.from_numpy(some | full) == cut[1].any(-1)).all()
        assert not (some & full).any()
        assert cut[0].all(-1)[torch.from_numpy(full)].all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 9])
def test_flex_attention_with_the_mask_of_the_tree(window: int | None) -> None:
    (pack,) = pack_rows(rows_from_lists(grown(1, 12, 90, 300)), 10_000)
    seen, position = ancestors(pack)
    if window is not None:
        seen &= position[:, None] - position < window
    tree = token_tree(pack.cu_lengths, pack.places)
    mask = TreeMask(subtree_ends(tree, pack.places), depths(tree), torch.device("cpu")).within(window)
    torch.manual_seed(0)
    q, k, v = (torch.randn(pack.num_computed, n, 16) for n in (4, 2, 2))
    output = tree_flex(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask, None)
    torch.testing.assert_close(output[0].transpose(0, 1), masked(q, k, v, seen), rtol=1e-5, atol=1e-5)
