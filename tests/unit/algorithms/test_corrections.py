"""Off-policy corrections: factors against loops over sequences, what the loss sees, effective sample sizes, options."""

from __future__ import annotations

from dataclasses import replace
from math import exp, prod

import numpy as np
import pytest
import torch

from astraflow.algorithms.corrections import Corrected, Mask, Reject, Truncate
from astraflow.algorithms.importance import effective_share, log_ratios, ratio_sums
from astraflow.algorithms.losses.contract import TrainedTokens
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.algorithms.losses.reinforce import Reinforce
from astraflow.errors import Problem

RATIOS = [[1.0, 3.0, 0.5], [4.0], [0.1, 0.4], [1.2, 0.9, 1.1, 1.0]]
FLAT = [r for sequence in RATIOS for r in sequence]


@pytest.fixture
def tokens():
    behavior = torch.full((len(FLAT),), -2.0, dtype=torch.float64)
    policy = behavior + torch.tensor(FLAT, dtype=torch.float64).log()
    advantages = torch.linspace(-1, 1, len(FLAT), dtype=torch.float64)
    return TrainedTokens.of(policy, behavior, advantages, torch.tensor([len(s) for s in RATIOS]))


def _expanded(per_sequence):
    return [value for value, sequence in zip(per_sequence, RATIOS, strict=True) for _ in sequence]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Truncate(2.0), [min(r, 2.0) for r in FLAT]),
        (Truncate(2.0, "sequence"), _expanded([min(prod(s), 2.0) for s in RATIOS])),
        (Mask(0.45, 3.5), [r if 0.45 <= r <= 3.5 else 0.0 for r in FLAT]),
        (Mask(0.5, 3.0, "sequence"), _expanded([p if 0.5 <= (p := prod(s)) <= 3 else 0.0 for s in RATIOS])),
        (Reject(0.5, 2.0, 0.0), _expanded([float(0.5 <= prod(s) ** (1 / len(s)) <= 2) for s in RATIOS])),
        (Reject(0.01, 9.0, 0.2), _expanded([float(min(s) >= 0.2) for s in RATIOS])),
    ],
)
def test_factors(tokens, correction, expected):
    factors, sums = correction(tokens)
    assert factors.tolist() == pytest.approx(expected)
    assert len(set(expected)) > 0 and any(0 < v < len(FLAT) for v in sums.values())
    losses, more = Corrected(Reinforce(), [correction])(tokens)
    plain, _ = Reinforce()(tokens)
    assert torch.allclose(losses, plain * factors) and set(sums) <= set(more)


def test_factors_multiply_and_have_no_gradient(tokens):
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    given = TrainedTokens.of(leaf, tokens.behavior_logprobs, tokens.advantages, tokens.lengths.long())
    both = Corrected(Reinforce(), [Truncate(2.0), Reject(0.5, 2.0)])
    losses, _ = both(given)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    factors = Truncate(2.0)(tokens)[0] * Reject(0.5, 2.0)(tokens)[0]
    assert torch.allclose(gradient, -factors * tokens.advantages)


def test_the_mean_weight_is_that_of_all_factors_that_weigh(tokens):
    ratio = torch.tensor(FLAT, dtype=torch.float64)
    for corrections, expected in (
        ([Truncate(2.0), Mask(0.45), Reject(0.9, 1.1)], ratio.clamp(max=2) * ratio * (ratio >= 0.45)),
        ([Truncate(2.0)], ratio.clamp(max=2)),
    ):
        _, sums = Corrected(Reinforce(), corrections)(tokens)
        assert sums["correction/weight"].item() == pytest.approx(expected.sum().item())
    assert "correction/weight" not in Corrected(Reinforce(), [Reject()])(tokens)[1]


def test_with_weights_a_ratio_does_not_count_twice(tokens):
    """Truncate at infinity makes the clipped loss the importance-weighted policy gradient, ratio 1 inside."""
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    given = TrainedTokens.of(leaf, tokens.behavior_logprobs, tokens.advantages, tokens.lengths.long())
    losses, sums = Corrected(PpoClip(), [Truncate(1e6)])(given)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    ratio = torch.tensor(FLAT, dtype=torch.float64)
    assert torch.allclose(gradient, -ratio * tokens.advantages) and sums["policy/clip_fraction"] == 0
    only_rejected, sums = Corrected(PpoClip(), [Reject(0.01, 99.0, 0.0)])(given)
    assert torch.allclose(only_rejected, PpoClip()(given)[0]) and sums["policy/clip_fraction"] > 0


def test_who_corrects_off_policy_data():
    assert Corrected(PpoClip(), [Truncate()]).corrects_off_policy and Corrected(PpoClip(), [Mask()]).corrects_off_policy
    assert not Corrected(PpoClip(), [Reject()]).corrects_off_policy


ENGINES = ["half", "full", "half", "other"]
OF_HALF = [engine == "half" for engine, sequence in zip(ENGINES, RATIOS, strict=True) for _ in sequence]


def by_engine(tokens, engines=ENGINES):
    return replace(tokens, engines=np.array(engines))


@pytest.mark.parametrize("default", [[], [Mask(0.45, 3.5)]])
@pytest.mark.parametrize(
    ("own", "factors"),
    [
        (Truncate(2.0), [min(r, 2.0) for r in FLAT]),
        (Truncate(2.0, "sequence"), _expanded([min(prod(s), 2.0) for s in RATIOS])),
        (Reject(0.5, 2.0, 0.0), _expanded([float(0.5 <= prod(s) ** (1 / len(s)) <= 2) for s in RATIOS])),
    ],
)
def test_what_an_engine_sampled_gets_its_own_corrections(tokens, default, own, factors):
    others = default[0](tokens)[0].tolist() if default else [1.0] * len(FLAT)
    expected = torch.tensor([f if half else o for f, o, half in zip(factors, others, OF_HALF, strict=True)])
    corrected = Corrected(Reinforce(), default, by_engine={"half": [own]})
    losses, sums = corrected(by_engine(tokens))
    assert torch.allclose(losses, Reinforce()(tokens)[0] * expected)
    (counted,) = {"correction/truncated", "correction/rejected"} & set(sums)
    whole, alone = own(tokens)[1][counted], own(by_engine(tokens).of_sequences(np.array(ENGINES) == "half")[0])[1]
    assert sums[counted] == alone[counted] < whole
    weighs = expected if own.weighs and default else torch.where(torch.tensor(OF_HALF), expected, 1.0)
    if default and not own.weighs:
        weighs = torch.where(torch.tensor(OF_HALF), 1.0, expected)
    if own.weighs or default:
        assert sums["correction/weight"].item() == pytest.approx(weighs.sum().item())


def test_only_what_is_weighed_has_its_ratio_measured_from_the_update(tokens):
    """The gradient of the clipped loss: weight 1 inside for the engine that is corrected, the ratio for the others."""
    leaf = tokens.policy_logprobs.clone().requires_grad_()
    given = by_engine(replace(tokens, policy_logprobs=leaf))
    losses, _ = Corrected(PpoClip(clip_low=0.99, clip_high=99.0), [], by_engine={"half": [Truncate(2.0)]})(given)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    ratio = torch.tensor(FLAT, dtype=torch.float64)
    expected = torch.where(torch.tensor(OF_HALF), ratio.clamp(max=2.0), ratio)
    assert torch.allclose(gradient, -expected * tokens.advantages)


@pytest.mark.parametrize("engines", [None, ["full"] * 4, ["half"] * 4])
def test_batches_of_one_engine_and_of_unknown_ones(tokens, engines):
    corrected = Corrected(Reinforce(), [], by_engine={"half": [Truncate(2.0)], "quarter": [Reject()]})
    losses, sums = corrected(tokens if engines is None else by_engine(tokens, engines))
    factors = Truncate(2.0)(tokens)[0] if engines == ["half"] * 4 else 1.0
    assert torch.allclose(losses, Reinforce()(tokens)[0] * factors)
    assert {"correction/truncated", "correction/rejected", "correction/weight"} <= set(sums)  # on every rank


def test_old_data_must_be_corrected_whoever_sampled_it():
    assert not Corrected(PpoClip(), [], by_engine={"half": [Truncate()]}).corrects_off_policy
    assert not Corrected(PpoClip(), [Mask()], by_engine={"half": []}).corrects_off_policy
    assert Corrected(PpoClip(), [Mask()], by_engine={"half": [Truncate()]}).corrects_off_policy
    assert Corrected(PpoClip(), [], by_engine={"half": [Reject()]}).needs_proximal


def test_effective_shares_of_tokens_and_sequences(tokens):
    log_ratio = log_ratios(tokens.policy_logprobs, tokens.behavior_logprobs)
    sums = {k: v.item() for k, v in ratio_sums(log_ratio, tokens.sequences, 4).items()}
    whole = [prod(s) for s in RATIOS]
    for name, values in (("ratio", FLAT), ("sequence_ratio", whole)):
        share = effective_share(sums[name], sums[f"{name}_squares"], len(values))
        assert share == pytest.approx(sum(values) ** 2 / len(values) / sum(v**2 for v in values))
    assert sums["approx_kl"] == pytest.approx(sum(r - 1 - torch.tensor(r).double().log().item() for r in FLAT))
    assert effective_share(8.0, 8.0, 8) == 1 and effective_share(exp(9), exp(18), 10) == pytest.approx(0.1)
    assert effective_share(0.0, 0.0, 0) == 0


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Truncate(0.5), "corrections.high"),
        (lambda: Truncate(2.0, "group"), "corrections.level"),
        (lambda: Mask(1.5), "corrections.low"),
        (lambda: Reject(0.5, 0.9), "corrections.high"),
        (lambda: Reject(min_token_ratio=1.0), "min_token_ratio"),
    ],
)
def test_a_wrong_option_is_named(make, setting):
    with pytest.raises(Problem, match=setting):
        make()
