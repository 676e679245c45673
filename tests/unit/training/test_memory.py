"""What a trainer holds beside its model."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.config.schema import RunConfig
from astraflow.training.learner import Learner


@pytest.mark.parametrize("staleness", [0, 2])
def test_versions_are_kept_for_the_audit_as_long_as_batches_can_hold_their_tokens(
    tiny_char, tmp_path, make_table, random_rows, staleness
):
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 6, "seed": 4},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": {
                "model": str(tiny_char), "batch": {"max_staleness": staleness}, "trainer": {"device": "cpu"},
            }},
        }
    )  # fmt: skip
    learner = Learner(config, "actor", tmp_path, threads=1)
    for version in range(5):
        rows = random_rows([20, 9, 14, 33], seed=version)
        versions = [
            np.where(mask, np.maximum(0, version - np.arange(len(ids)) % (staleness + 1)), -1).astype(np.int32)
            for ids, mask in rows
        ]
        metrics = learner.train(make_table(rows, versions=versions))
        assert metrics["logprob_gap/unknown_tokens"] == 0 and metrics["logprob_gap/tokens"] > 0
    learner.close()
    assert len(learner.auditor.versions) == staleness + 1
