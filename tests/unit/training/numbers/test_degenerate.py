"""Groups that teach nothing, or too little to divide by: the gradient stays finite, and of equal rewards it is zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config import rooms
from astraflow.errors import DataflowError
from astraflow.models.scoring.packing import rows_from_table
from astraflow.testing.operators import chain, group
from one_step import gradient_of_step, still_settings

GROUPS = [[1.0, 0.0, 0.0, 0.0], [0.35] + [0.4] * 7, [0.7] * 4, [1.0, None, 0.0], [1.0]]
# Per call there is no one advantage of an episode, and of two the trainer makes the credit itself.
ESTIMATORS = sorted(set(rooms.ROOMS["advantages"]) - {"per_call", "gae", "distill"})


def credited(name, rewards):
    own = chain(advantage=rooms.build("advantages", name, {}, "here"))
    result = own.on_group(group(rewards))
    own.on_batch([result], 1)
    return result.advantages


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_step_on_a_degenerate_group_is_finite(model, make_table, random_rows, name):
    for rewards in GROUPS:
        advantages = credited(name, rewards)
        listed = random_rows([12 + i for i in range(len(rewards))])
        scored = [i for i, r in enumerate(rewards) if r is not None]
        table = make_table(
            [listed[i] for i in scored],
            advantages=[np.where(listed[i][1], advantages[i], 0.0).astype(np.float32) for i in scored],
        )
        metrics, gradient = gradient_of_step(model, PpoClip(), rows_from_table(table), still_settings())
        assert torch.isfinite(gradient).all() and all(map(math.isfinite, metrics.values()))
        assert max(map(abs, advantages)) < 10 and metrics["skipped_steps"] == 0
        if len({r for r in rewards if r is not None}) == 1:
            assert advantages == [0.0] * len(rewards) and not gradient.any()
        else:
            assert gradient.any()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(name, wrong):
    with pytest.raises(DataflowError, match=r"nan|inf"):
        credited(name, [1.0, wrong, 0.0])
