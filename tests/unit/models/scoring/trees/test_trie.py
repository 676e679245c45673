"""The trie of an episode with forks of forks: gradients are those of its sequences one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.layout import TreeLayout, pack_layout
from astraflow.models.scoring.packing import Pack, TokenRows, pack_rows, rows_to_score
from astraflow.rollout.context.trie import full_sequence
from astraflow.types import Episode
from astraflow.wire.episodes import encode_episodes
from plain_scores import plain_gradient, plain_logprobs

BUDGETS = [1, 60, 120, 10_000]  # one sequence a pack; tries that are cut once or twice; one that is not


def rows_of(episode: Episode) -> TokenRows:
    """Over the wire."""
    _, table = encode_episodes([episode], "n")
    return rows_to_score(table)


def plainly(rows: TokenRows) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each row by itself."""
    return [(rows.token_ids[a:b], rows.trained[a:b]) for a, b in pairwise(rows.starts.tolist())]


def in_order(model: PreTrainedModel, packs: list[Pack]) -> torch.Tensor:
    """Logprobs of all trained tokens in the order of the rows' flat columns."""
    logprobs = torch.cat([packed_logprobs(model, pack, 1.0).logprobs for pack in packs])
    places = torch.from_numpy(np.concatenate([pack.versions for pack in packs])).long()
    assert len(places.unique()) == len(places), "a token is trained twice"
    return logprobs[places.argsort()]


@pytest.mark.usefixtures("every_stretch")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "window"])
def test_gradients_are_those_of_separate_sequences(
    make_decoder: Callable[[str], PreTrainedModel], forked_episode: Episode, family: str, budget: int
) -> None:
    rows = rows_of(forked_episode)
    plain = torch.cat(plain_logprobs(make_decoder(family), plainly(rows)))
    weights = torch.linspace(-1, 1, len(plain))  # each token has an advantage of its own
    model = make_decoder(family)
    expected = plain_gradient(model, (torch.cat(plain_logprobs(model, plainly(rows))) * weights).sum())
    packs = pack_rows(rows, budget)
    prepare_model(model)
    found = in_order(model, packs)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-4)
    gradient = plain_gradient(model, (found * weights).sum())
    assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_the_trie_is_in_the_rows_and_in_the_packs(forked_episode: Episode) -> None:
    rows = rows_of(forked_episode)
    branches = forked_episode.trajectories
    paths = [full_sequence(branches, branch.branch).tolist() for branch in branches]
    assert [ids.tolist() for ids, _ in plainly(rows)] == paths
    (whole,) = pack_rows(rows, 10_000)
    distinct = {tuple(path[: n + 1]) for path in paths for n in range(len(path) - 1)}  # the last is only a target
    assert whole.num_computed == len(distinct) < whole.num_tokens / 3
    assert whole.num_targets == int(sum(b.loss_mask.sum() for b in branches))


@pytest.mark.parametrize("budget", [60, 120])
def test_a_large_trie_is_cut_and_what_its_parts_share_is_computed_once_in_each(
    forked_episode: Episode, budget: int
) -> None:
    packs = pack_rows(rows_of(forked_episode), budget)
    assert len(packs) > 1
    for pack in packs:
        assert pack.num_computed <= budget or len(pack.rows) == 1
        if pack.places is not None:
            ends = [(a, n + 1) for a, b in pairwise(pack.cu_lengths) for n in range(a, b)]
            assert len({tuple(pack.token_ids[pack.places[a:b]]) for a, b in ends}) == pack.num_computed


@pytest.mark.usefixtures("every_stretch")
def test_the_tree_is_used(forked_episode: Episode) -> None:
    (pack,) = pack_rows(rows_of(forked_episode), 10_000)
    tree = pack_layout(pack.cu_lengths, pack.places, torch.device("cpu"), torch.float32).tree
    assert isinstance(tree, TreeLayout) and len(tree.stretches) >= 4


@pytest.mark.usefixtures("every_stretch")
def test_under_autocast_the_arithmetic_is_bfloat16(
    make_decoder: Callable[[str], PreTrainedModel], forked_episode: Episode
) -> None:
    rows = rows_of(forked_episode)
    model = make_decoder("qwen3")
    exact = torch.cat(plain_logprobs(model, plainly(rows)))
    prepare_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = in_order(model, pack_rows(rows, 10_000))
    found.sum().backward()
    assert (found - exact).abs().mean() < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
