"""A step is the same for any number of ranks."""

from __future__ import annotations

import pytest

import ranked_steps
from ranks import run_ranks

ALL: tuple[str, ...] = ()
SOME = ("PpoClip token", "Gspo sequence", "Corrected 32.0", "one row", "updates", "kl in the loss", "frozen parts")


@pytest.mark.parametrize(("family", "num_ranks", "names"), [("llama", 2, ALL), ("gpt2", 2, SOME), ("qwen3", 3, SOME)])
def test_gradients_and_metrics_do_not_depend_on_the_number_of_ranks(tmp_path, family, num_ranks, names):
    for found in run_ranks(num_ranks, ranked_steps.compared, tmp_path, family, 1, 1, names):
        assert found.keys() >= {*names} and found
        far = {name: distance for name, (distance, _) in found.items() if not distance < 1e-6}
        assert far == {}
        assert {name: metrics for name, (_, metrics) in found.items() if metrics} == {}


def test_scores_under_other_weights_leave_no_trace(tmp_path):
    for under, after, same in run_ranks(2, ranked_steps.under_other_weights, tmp_path):
        assert under < 1e-4 and after < 1e-4 and same


def test_several_steps_stay_together(tmp_path):
    """M2PO makes a pass without gradient before each update."""
    for differences in run_ranks(2, ranked_steps.learn, tmp_path, "llama", 4, 1e-2):
        assert max(differences) < 1e-4


def test_a_stop_on_one_rank_ends_the_step_on_all(tmp_path):
    assert run_ranks(2, ranked_steps.interrupted, tmp_path) == [(True, 2)] * 2


def test_a_bad_row_of_one_rank_skips_the_update_on_all(tmp_path):
    assert run_ranks(2, ranked_steps.not_finite, tmp_path) == [(1.0, True)] * 2
