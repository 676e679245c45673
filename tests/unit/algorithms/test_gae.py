"""GAE and the loss of a critic against loops in plain floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.gae import gae, value_losses

numbers = st.floats(-10, 10)
chains = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40), max_size=6)


def by_hand(chain, gamma, lam):
    """As in the paper, from the end."""
    result, after, following = [], 0.0, 0.0
    for reward, value in reversed(chain):
        after = reward + gamma * following - value + gamma * lam * after
        following = value
        result.append(after)
    return result[::-1]


@given(chains, st.sampled_from([1.0, 0.99, 0.5]), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_each_chain_is_its_own(listed, gamma, lam):
    flat = [pair for chain in listed for pair in chain]
    rewards, values = (np.array([pair[i] for pair in flat], np.float32) for i in (0, 1))
    last = np.array([i + 1 == len(chain) for chain in listed for i in range(len(chain))], bool)
    exact = [[(float(np.float32(r)), float(np.float32(v))) for r, v in chain] for chain in listed]
    expected = [a for chain in exact for a in by_hand(chain, gamma, lam)]
    assert gae(rewards, values, last, gamma, lam).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_lambda_one_is_the_return_and_lambda_zero_the_surprise():
    rewards, values = np.array([0.0, 1.0, 2.0]), np.array([0.5, 0.25, 4.0])
    last = np.array([False, False, True])
    assert gae(rewards, values, last, 0.5, 1.0).tolist() == [0.5 + 0.5 - 0.5, 1 + 1 - 0.25, 2.0 - 4.0]
    assert gae(rewards, values, last, 0.5, 0.0).tolist() == [0.5 * 0.25 - 0.5, 1 + 0.5 * 4 - 0.25, 2.0 - 4.0]


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20), st.sampled_from([0.0, 0.2, 3.0]))
def test_the_loss_of_a_critic(rows, clip):
    values, before, targets = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    losses, clipped = value_losses(values, before, targets, clip)
    for i, (v, b, g) in enumerate(rows):
        bounded = b + min(max(v - b, -clip), clip) if clip else v
        assert losses[i].item() == pytest.approx(max((v - g) ** 2, (bounded - g) ** 2) / 2, rel=1e-9, abs=1e-12)
        assert bool(clipped[i]) == ((bounded - g) ** 2 > (v - g) ** 2)


def test_gradients_of_the_loss_are_those_of_finite_differences():
    values = torch.tensor([0.0, 0.5, -1.0, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    before = torch.tensor([0.1, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    targets = torch.tensor([1.0, 2.0, 1.0, -1.0, 0.05], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_losses(v, before, targets, 0.2)[0], [values])
    losses, clipped = value_losses(values, before, targets, 0.2)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert clipped.tolist() == [False, True, False, False, False] and gradient[1] == 0
