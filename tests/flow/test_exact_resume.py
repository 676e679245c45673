"""A trainer that is killed goes on as if nothing had happened: `tests/faults/test_exact_resume.py` at more moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from killed_trainers import Death, content_of, resume_config, train_with

STEPS = 9


@pytest.mark.flow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_trainer_ends_with_the_same_bytes(tmp_path: Path, num_ranks: int) -> None:
    config = resume_config(STEPS)
    whole = train_with(config, tmp_path / "whole", num_ranks)
    cut = train_with(config, tmp_path / "cut", num_ranks, [Death(5, 0.05, num_ranks - 1, num_ranks)])
    assert cut.codes[-1] == [0] * num_ranks, cut.words
    assert -9 in cut.codes[0], cut.words
    assert len(whole.facts()) == len(cut.facts()) == STEPS
    for there, here in zip(whole.facts(), cut.facts(), strict=True):
        assert {k: v for k, v in here.items() if there.get(k) != v} == {} and here.keys() == there.keys()
    assert content_of(cut.checkpoint) == content_of(whole.checkpoint)
