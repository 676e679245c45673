"""A trainer that is killed five times ends as one that was not: weights, moments, schedule, random state, batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from killed_trainers import content_of, deaths, distance, resume_config, train_with

STEPS, KILLS, SEED = 36, 5, 7
LOST = 3  # exit code of a rank that misses another one


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_five_kills_change_nothing(tmp_path: Path, num_ranks: int) -> None:
    config = resume_config(STEPS)
    whole = train_with(config, tmp_path / "whole", num_ranks)
    killed = deaths(STEPS, KILLS, num_ranks, SEED)
    cut = train_with(config, tmp_path / "cut", num_ranks, killed)
    for death, codes in zip(killed, cut.codes, strict=False):
        others = [code for rank, code in enumerate(codes) if rank != death.rank]
        assert codes[death.rank] == -9 and others == [LOST] * (num_ranks - 1), cut.words
    assert cut.codes[-1] == [0] * num_ranks, cut.words
    assert len(cut.codes) == KILLS + 1
    assert cut.words.count("resumed at version") >= 2  # who dies before a checkpoint is whole starts anew
    assert len(whole.facts()) == len(cut.facts()) == STEPS
    for there, here in zip(whole.facts(), cut.facts(), strict=True):
        assert {k: v for k, v in here.items() if there.get(k) != v} == {} and here.keys() == there.keys()
    assert content_of(cut.checkpoint) == content_of(whole.checkpoint)


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_one_rank_goes_on_where_two_were_killed(tmp_path: Path) -> None:
    """Equal up to rounding only: two ranks add up halves of a gradient that one rank adds up in one go, and Adam
    divides small differences by small gradients."""
    config = resume_config(STEPS)
    whole = train_with(config, tmp_path / "whole", 2)
    cut = train_with(config, tmp_path / "cut", 2, deaths(STEPS, 2, 2, SEED, after=1))
    assert cut.codes[-1] == [0], cut.words
    assert [row["step"] for row in cut.rows] == list(range(1, STEPS + 1))
    assert distance(cut.checkpoint, whole.checkpoint) < 1e-6
