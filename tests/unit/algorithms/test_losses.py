"""The policy losses: values, where the gradient goes, and that nothing explodes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.importance import log_ratios, ratio_sums
from astraflow.algorithms.losses.contract import TrainedTokens
from astraflow.algorithms.losses.decoupled_ppo import DecoupledPpo
from astraflow.algorithms.losses.m2po import M2po
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.errors import Problem

finite = st.floats(-1e4, 0.0, width=32)
tokens = st.lists(st.tuples(finite, finite, st.floats(-10, 10, width=32)), min_size=1, max_size=40)


def _tokens(policy, behavior, advantages):
    return TrainedTokens.of(policy, behavior, advantages, torch.tensor([len(policy)]))


def _run(loss, ratios, advantages, prepared=None):
    """Losses, gradient per token and sums, for behaviour logprobs of -1."""
    policy = (torch.tensor(ratios).log() - 1).requires_grad_()
    losses, sums = loss(_tokens(policy, torch.full_like(policy, -1.0).detach(), torch.tensor(advantages)), prepared)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    return losses.detach(), gradient, sums


def test_ppo_clip_takes_the_pessimistic_bound():
    ratios, advantages = [1.0, 1.5, 0.5, 1.5, 0.5, 1.4], [1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    losses, gradient, sums = _run(PpoClip(clip_low=0.2, clip_high=0.3), ratios, advantages)
    assert torch.allclose(losses, torch.tensor([-1.0, -1.3, -0.5, 1.5, 0.8, -1.3]))
    assert (gradient == 0).tolist() == [False, True, False, False, True, True]
    assert sums["policy/clip_fraction"] == 3
    assert sums["policy/clip_low_fraction"] == 1 and sums["policy/clip_high_fraction"] == 2


def test_gradient_at_ratio_one_is_minus_the_advantage():
    for loss in (PpoClip(), PpoClip(dual_clip=3.0), M2po()):
        _, gradient, _ = _run(loss, [1.0, 1.0], [2.0, -0.5])
        assert torch.allclose(gradient, torch.tensor([-2.0, 0.5]))


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    losses, gradient, sums = _run(PpoClip(dual_clip=3.0), [50.0, 50.0, 2.9], [-1.0, 1.0, -1.0])
    assert torch.allclose(losses, torch.tensor([3.0, -1.2, 2.9]))
    assert (gradient == 0).tolist() == [True, True, False]
    assert sums["policy/clip_high_fraction"] == 2, "a token that the second bound holds is clipped too"


@given(tokens)
def test_losses_and_gradients_are_finite_for_any_logprobs(rows):
    policy, behavior, advantages = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    for loss in (PpoClip(), PpoClip(dual_clip=2.0), M2po(), M2po(threshold=1e-3)):
        leaf = policy.clone().requires_grad_()
        losses, sums = loss(_tokens(leaf, behavior, advantages))
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        assert losses.isfinite().all() and gradient.isfinite().all()
        assert all(value.isfinite() for value in sums.values())


def test_m2po_leaves_a_near_batch_alone():
    ratios, advantages = [1.1, 0.9, 1.05, 0.95], [1.0, -1.0, -1.0, 1.0]
    losses, gradient, sums = _run(M2po(threshold=0.04), ratios, advantages)
    assert torch.allclose(losses, -torch.tensor(ratios) * torch.tensor(advantages))
    assert (gradient != 0).all() and sums["policy/clip_fraction"] == 0


@given(tokens, st.sampled_from([1e-3, 0.04, 1.0]))
def test_m2po_drops_the_fewest_largest_outward_tokens(rows, threshold):
    policy, behavior, advantages = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    leaf = policy.clone().requires_grad_()
    losses, sums = M2po(threshold=threshold, max_log_ratio=10.0)(_tokens(leaf, behavior, advantages))
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    log_ratio = log_ratios(policy, behavior)
    outward = log_ratio * advantages.sign() > 0
    moments = log_ratio[outward].square().double()
    within = log_ratio.abs() < 10  # beyond, the fixed bound of the window decides
    kept = moments[(gradient[outward] != 0) & within[outward]]
    if len(kept):
        assert kept.mean() <= threshold * (1 + 1e-6)
    dropped = outward & (gradient == 0) & within & (advantages != 0)
    assert (gradient[~outward & within & (advantages != 0)] != 0).all(), "an inward token lost its gradient"
    if dropped.any():
        smallest = log_ratio[dropped].square().double().min()
        assert torch.cat([kept, smallest[None]]).mean() > threshold * (1 - 1e-6), "one token too many was dropped"
        assert not len(kept) or kept.max() < smallest
    assert sums["policy/clip_fraction"] >= dropped.sum()


def test_m2po_keeps_no_token_beyond_its_fixed_bound():
    """What the moment would allow is no more than `max_log_ratio`, also where the moment drops something."""
    ratios = [math.exp(4.0), math.exp(9.0), *[1.01] * 10]
    _, gradient, sums = _run(M2po(threshold=2.0, max_log_ratio=3.0), ratios, [1.0] * 12)
    assert (gradient == 0).tolist() == [True, True, *[False] * 10] and sums["policy/clip_fraction"] == 2


def test_decoupled_ppo_leaves_out_tokens_that_the_behaviour_hardly_said():
    """exact: q is the policy, so the weight is the ratio itself."""
    losses, gradient, sums = _run(DecoupledPpo(proximal="exact", max_weight=5.0), [4.0, 6.0], [1.0, 1.0])
    assert losses.tolist() == [pytest.approx(-4.0), 0.0] and gradient.tolist() == [pytest.approx(-4.0), 0.0]
    assert sums["policy/dropped_fraction"] == 1
    assert _run(DecoupledPpo(proximal="exact", max_weight=0), [6.0], [1.0])[0].item() == pytest.approx(-6.0)


def test_m2po_pushes_a_token_that_moved_the_wrong_way_back_with_a_bounded_force():
    _, gradient, _ = _run(M2po(max_log_ratio=3.0), [1000.0], [-1.0])
    assert gradient[0] == pytest.approx(math.exp(3.0), rel=1e-5)


def test_m2po_prepared_on_the_batch_does_not_depend_on_the_cut():
    generator = torch.Generator().manual_seed(0)
    policy, behavior = (torch.randn(64, generator=generator) for _ in range(2))
    advantages = torch.randn(64, generator=generator)
    loss = M2po()
    whole, _ = loss(_tokens(policy, behavior, advantages))
    prepared = loss.prepare(_tokens(policy, behavior, advantages))
    pieces = [_tokens(*(x[i : i + 7] for x in (policy, behavior, advantages))) for i in range(0, 64, 7)]
    parts = [loss(piece, prepared)[0] for piece in pieces]
    assert torch.equal(whole, torch.cat(parts))
    alone = torch.cat([loss(piece)[0] for piece in pieces])
    assert not torch.equal(whole, alone), "a cut without preparation should matter, or this test shows nothing"


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: PpoClip(clip_low=1.5), "clip_low"),
        (lambda: PpoClip(clip_high=0), "clip_high"),
        (lambda: PpoClip(dual_clip=0.5), "dual_clip"),
        (lambda: M2po(threshold=0), "threshold"),
        (lambda: M2po(max_log_ratio=50), "max_log_ratio"),
        (lambda: M2po(aggregation="mean"), "aggregation"),
        (lambda: M2po(tokens="some"), "tokens"),
    ],
)
def test_a_wrong_option_is_named(make, setting):
    with pytest.raises(Problem, match=setting):
        make()


@given(tokens)
def test_approximate_kl_is_never_negative(rows):
    policy, behavior, _ = (torch.tensor(column) for column in zip(*rows, strict=True))
    assert ratio_sums(log_ratios(policy, behavior), torch.zeros(len(policy), dtype=torch.int64), 1)["approx_kl"] >= 0
