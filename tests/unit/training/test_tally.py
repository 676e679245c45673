"""Metrics of a step by hand."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.training.optimize.tally import Done, batch_metrics


def test_metrics_are_means_over_tokens_sequences_and_updates():
    sums = {
        "loss": 6.0, "entropy": 8.0, "approx_kl": 2.0, "policy/kl_k1": 4.0, "ratio": 8.0, "ratio_squares": 16.0,
        "sequence_ratio": 2.0, "sequence_ratio_squares": 4.0,
    }  # fmt: skip
    critic = [{"critic/loss": 1.0}, {"critic/loss": 3.0}]
    done = Done(updates=2, tokens=8, sequences=4, grad_norm=5.0, largest_log_ratio=0.0, sums=sums, critic=critic)
    assert done.metrics() == {
        "updates": 2, "loss": 3.0, "grad_norm": 2.5, "policy/entropy": 1.0, "policy/approx_kl": 0.25,
        "policy/ratio_mean": 1.0, "policy/ratio_max": 1.0, "policy/kl_k1": 0.5, "critic/loss": 2.0,
        "policy/ess": 8.0**2 / (8 * 16), "policy/ess_sequences": 2.0**2 / (4 * 4),
    }  # fmt: skip


@pytest.mark.parametrize("budget", [1, 1000])
def test_staleness_is_that_of_the_oldest_token_of_each_trajectory(make_table, budget):
    rows = [([1, 5, 6, 7], [0, 1, 1, 1]), ([1, 8, 9], [0, 1, 1])]
    table = make_table(rows, versions=[[-1, 7, 4, 5], [-1, 7, 7]])
    metrics = batch_metrics(pack_rows(rows_from_table(table), budget), 7)
    assert metrics["staleness/max"] == 3 and metrics["staleness/mean"] == 1.5
    assert metrics["staleness/fresh_tokens"] == 3 / 5
    assert metrics["tokens"] == 5 and metrics["sequences"] == 2 and metrics["input_tokens"] == 5


@pytest.mark.parametrize("budget", [1, 1000])
def test_shares_of_trained_tokens_by_engine(make_table, budget):
    rows = [([1, 5, 6, 7], [0, 1, 1, 1]), ([1, 8, 9], [0, 1, 1]), ([1, 8], [0, 1]), ([1, 8, 7, 6, 5], [0, 1, 1, 1, 1])]
    engines = ["local-float32@a", "vllm-bfloat16@b", "local-float32@c", ""]
    metrics = batch_metrics(pack_rows(rows_from_table(make_table(rows, engine=engines)), budget), 7)
    shares = {name: value for name, value in metrics.items() if name.startswith("engine_share")}
    assert shares == {"engine_share/local-float32": 0.4, "engine_share/vllm-bfloat16": 0.2}
    bare = rows_from_table(make_table(rows).drop_columns(["engine"]))
    assert bare.engines is None and rows_from_table(make_table(rows)).engines is None


def test_a_batch_with_nothing_to_train_has_sizes_of_0():
    metrics = batch_metrics([], 3)
    assert metrics["tokens"] == metrics["sequences"] == metrics["staleness/max"] == 0
    assert np.isfinite(list(metrics.values())).all()


def test_advantages_whose_squares_float32_does_not_hold(make_table):
    rows = [([1, 5], [0, 1]), ([1, 8], [0, 1])]
    table = make_table(rows, advantages=[np.array([0, value], np.float32) for value in (2e30, -2e30)])
    metrics = batch_metrics(pack_rows(rows_from_table(table), 1000), 0)
    assert metrics["advantage/std"] == pytest.approx(2e30)
