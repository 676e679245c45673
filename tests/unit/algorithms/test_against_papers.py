"""Every loss against a loop written from its paper: values, gradients by finite differences; cuts; poor batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp

import pytest
import torch

from astraflow.algorithms.aggregate import coefficients
from astraflow.algorithms.corrections import Corrected, Mask, Reject, Truncate
from astraflow.algorithms.losses.cispo import Cispo
from astraflow.algorithms.losses.contract import TrainedTokens
from astraflow.algorithms.losses.decoupled_ppo import DecoupledPpo
from astraflow.algorithms.losses.gspo import Gspo
from astraflow.algorithms.losses.m2po import M2po
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.algorithms.losses.reinforce import Reinforce
from astraflow.algorithms.losses.sapo import Sapo
from loss_references import cispo, decoupled, dual_clip, exact_decoupled, gspo, ppo, reinforce, sapo, wide_gspo

LENGTHS = [3, 1, 7, 4, 12, 2]
CASES = {
    "ppo_clip": (PpoClip(), ppo),
    "dual_clip": (PpoClip(dual_clip=3.0), dual_clip),
    "reinforce": (Reinforce(), reinforce),
    "cispo": (Cispo(), cispo),
    "sapo": (Sapo(), sapo),
    "gspo": (Gspo(), gspo),
    "gspo, a wide window": (Gspo(0.3, 0.4), wide_gspo),
    "decoupled_ppo": (DecoupledPpo(), decoupled),
    "decoupled_ppo, exact": (DecoupledPpo(proximal="exact"), exact_decoupled),
}
AGGREGATIONS = ("token", "sequence", 16.0)
LOSSES = [loss for loss, _ in CASES.values()] + [
    M2po(),
    M2po(tokens="all"),
    Corrected(PpoClip(), [Truncate(1.5)]),
    Corrected(Reinforce(), [Mask(0.2, 4.0, "sequence"), Reject()]),
    Corrected(M2po(), [Reject(0.8, 1.3)]),
]


def batch(scale=0.6, seed=0, lengths=LENGTHS):
    """Sequences of one advantage each, in float64; far enough from the behaviour that everything clips somewhere."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    policy = -torch.rand(size, generator=generator, dtype=torch.float64) * 3
    behavior = policy - torch.randn(size, generator=generator, dtype=torch.float64) * scale
    per_sequence = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    staleness = torch.randint(0, 4, (size,), generator=generator).double()
    return TrainedTokens.of(policy, behavior, per_sequence.repeat_interleave(sizes), sizes, staleness)


def cut(tokens, first, last):
    """The sequences first to last - 1 as a microbatch of their own."""
    where = (tokens.sequences >= first) & (tokens.sequences < last)
    columns = (tokens.policy_logprobs, tokens.behavior_logprobs, tokens.advantages)
    return TrainedTokens.of(*(c[where] for c in columns), tokens.lengths[first:last].long(), tokens.staleness[where])


def total(loss, tokens, aggregation, num_tokens, num_sequences, prepared=None):
    losses, _ = loss(tokens, prepared)
    factors = coefficients(
        aggregation, torch.ones_like(losses), tokens.lengths[tokens.sequences], num_tokens, num_sequences
    )
    return (factors * losses).sum()


def reference_total(formula, aggregation, policy, tokens):
    """One number of a batch by the formula of a paper, sequence by sequence."""
    lists = [policy, *(x.tolist() for x in (
        tokens.behavior_logprobs, tokens.advantages, tokens.policy_logprobs.detach(), tokens.staleness
    ))]  # fmt: skip
    result, start, lengths = 0.0, 0, tokens.lengths.long().tolist()
    for length in lengths:
        losses = formula(*(x[start : start + length] for x in lists))
        match aggregation:
            case "token":
                result += sum(losses) / sum(lengths)
            case "sequence":
                result += sum(losses) / length / len(lengths)
            case constant:
                result += sum(losses) / constant / len(lengths)
        start += length
    return result


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_paper(name, aggregation):
    loss, formula = CASES[name]
    tokens = batch()
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    value = total(loss, replace(tokens, policy_logprobs=leaf), aggregation, sum(LENGTHS), len(LENGTHS))
    (gradient,) = torch.autograd.grad(value, leaf)
    policy = tokens.policy_logprobs.tolist()
    assert value.item() == pytest.approx(reference_total(formula, aggregation, policy, tokens), rel=1e-9)
    step = 1e-6
    for i in range(len(policy)):
        up, down = (
            reference_total(formula, aggregation, [*policy[:i], policy[i] + h, *policy[i + 1 :]], tokens)
            for h in (step, -step)
        )
        assert gradient[i].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8), i
    assert (gradient != 0).any()


@pytest.mark.parametrize("of", ["outward", "all"])
def test_m2po_is_its_algorithm_1(of):
    """Drop the largest (log r)^2 one by one until the mean of the rest is within the threshold; of both token sets."""
    tokens = batch()
    threshold = 0.04
    log_ratio = (tokens.policy_logprobs - tokens.behavior_logprobs).tolist()
    pairs = list(zip(log_ratio, tokens.advantages.tolist(), strict=True))
    counting = [i for i, (x, a) in enumerate(pairs) if of == "all" or (a > 0 and x > 0) or (a < 0 and x < 0)]
    kept = sorted(counting, key=lambda i: log_ratio[i] ** 2)
    while kept and sum(log_ratio[i] ** 2 for i in kept) / len(kept) > threshold:
        kept.pop()
    dropped = set(counting) - set(kept)
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    losses, sums = M2po(threshold, tokens=of)(replace(tokens, policy_logprobs=leaf))
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert 0 < len(dropped) < len(counting) and sums["policy/clip_fraction"] == len(dropped)
    assert sums[f"policy/{of}_m2"].item() == pytest.approx(sum(log_ratio[i] ** 2 for i in counting))
    window = max(abs(log_ratio[i]) for i in kept)
    for i, (x, a) in enumerate(pairs):
        assert gradient[i].item() == pytest.approx(0.0 if i in dropped else -exp(x) * a, rel=1e-9, abs=1e-12)
        clipped = -min(exp(x) * a, exp(min(max(x, -window), window)) * a)  # as PPO clips, x in [-window, window]
        masked = 0.0 if i in dropped else -exp(x) * a
        assert losses[i].item() == pytest.approx(clipped if of == "outward" else masked, rel=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_the_cut_into_microbatches_changes_nothing(loss, aggregation):
    tokens = batch()
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    tokens = replace(tokens, policy_logprobs=leaf)
    (whole,) = torch.autograd.grad(total(loss, tokens, aggregation, sum(LENGTHS), len(LENGTHS)), leaf)
    prepared = loss.prepare(tokens)
    for bounds in ([0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 6], [0, 5, 6]):
        parts = [
            total(loss, cut(tokens, a, b), aggregation, sum(LENGTHS), len(LENGTHS), prepared)
            for a, b in pairwise(bounds)
        ]
        (gradient,) = torch.autograd.grad(torch.stack(parts).sum(), leaf)
        assert torch.allclose(gradient, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_degenerate_batches(loss):
    empty = batch(lengths=[])
    losses, sums = loss(empty, loss.prepare(empty))
    assert losses.shape == (0,) and all(value == 0 for value in sums.values())
    tokens = batch(lengths=[1])
    losses, sums = loss(tokens)
    assert losses.shape == (1,) and losses.isfinite().all()
    tokens = batch()
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    losses, _ = loss(replace(tokens, policy_logprobs=leaf, advantages=torch.zeros_like(tokens.advantages)))
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert (losses == 0).all() and (gradient == 0).all()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_nothing_explodes_in_float32(loss):
    size = 40
    policy = torch.cat([torch.full((size // 2,), -1e4), torch.full((size // 2,), -1e-3)]).requires_grad_()
    behavior = policy.detach().flip(0)
    advantages = torch.tensor([1.0, -1.0]).repeat(size // 2)
    tokens = TrainedTokens.of(policy, behavior, advantages, torch.tensor([10, 20, 10]), torch.ones(size))
    losses, sums = loss(tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    assert losses.isfinite().all() and gradient.isfinite().all() and all(v.isfinite() for v in sums.values())


@pytest.mark.parametrize(
    "loss", [item for item in LOSSES if not isinstance(item, Gspo)], ids=lambda loss: type(loss).__name__
)
def test_at_ratio_one_every_loss_is_the_plain_policy_gradient(loss):
    tokens = batch(scale=0.0)
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    losses, _ = loss(replace(tokens, policy_logprobs=leaf))
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert torch.allclose(gradient, -tokens.advantages)


def test_gspo_at_ratio_one_is_the_plain_policy_gradient():
    tokens = batch(scale=0.0)
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Gspo()(replace(tokens, policy_logprobs=leaf))[0].sum(), leaf)
    assert torch.allclose(gradient, -tokens.advantages)


def test_a_recorded_proximal_policy_takes_the_place_of_the_present_one():
    tokens = batch()
    proximal = tokens.policy_logprobs - 0.5  # a step ago: r = exp(0.5) clips
    losses, sums = DecoupledPpo(proximal="exact", max_weight=0)(replace(tokens, proximal_logprobs=proximal))
    weight = (proximal - tokens.behavior_logprobs).exp()
    r = torch.tensor(0.5, dtype=torch.float64).exp()
    expected = -weight * torch.minimum(r * tokens.advantages, 1.2 * tokens.advantages)
    assert torch.allclose(losses, expected) and sums["policy/clip_fraction"] == (tokens.advantages > 0).sum()
