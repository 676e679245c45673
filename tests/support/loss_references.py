"""The losses written once more from their papers: loops over sequences and tokens in plain Python floats.

Each gives the loss per token of one sequence: policy, behaviour and advantage are lists over its tokens. What a paper
holds constant (its stop-gradient) is computed from `frozen`, the policy's logprobs where the gradient is taken.
"""

from __future__ import annotations

from math import exp

MAX = 20.0


def ratio(policy, behavior):
    return exp(min(MAX, max(-MAX, policy - behavior)))


def clip(value, low, high):
    return min(high, max(low, value))


def ppo(policy, behavior, advantages, frozen, staleness, low=0.8, high=1.2):
    ratios = [ratio(p, b) for p, b in zip(policy, behavior, strict=True)]
    return [-min(r * a, clip(r, low, high) * a) for r, a in zip(ratios, advantages, strict=True)]


def dual_clip(policy, behavior, advantages, frozen, staleness):
    losses = ppo(policy, behavior, advantages, frozen, staleness)
    return [min(loss, -3 * a) if a < 0 else loss for loss, a in zip(losses, advantages, strict=True)]


def reinforce(policy, behavior, advantages, frozen, staleness):
    return [-a * p for p, a in zip(policy, advantages, strict=True)]


def cispo(policy, behavior, advantages, frozen, staleness):
    weights = [clip(ratio(f, b), 0.0, 5.0) for f, b in zip(frozen, behavior, strict=True)]
    return [-w * a * p for w, a, p in zip(weights, advantages, policy, strict=True)]


def sapo(policy, behavior, advantages, frozen, staleness):
    losses = []
    for p, b, a in zip(policy, behavior, advantages, strict=True):
        tau = 1.0 if a > 0 else 1.05
        losses.append(-a * 4 / tau / (1 + exp(-tau * (ratio(p, b) - 1))))
    return losses


def gspo(policy, behavior, advantages, frozen, staleness, low=1 - 3e-4, high=1 + 4e-4):
    """Of the whole sequence, for one advantage: every token has its loss."""
    s = exp(sum(p - b for p, b in zip(policy, behavior, strict=True)) / len(policy))
    return [-min(s * a, clip(s, low, high) * a) for a in advantages]


def wide_gspo(*arguments):
    return gspo(*arguments, low=0.7, high=1.4)


def decoupled(policy, behavior, advantages, frozen, staleness):
    losses = []
    for p, b, a, f, d in zip(policy, behavior, advantages, frozen, staleness, strict=True):
        proximal = f if d == 0 else b / d + (1 - 1 / d) * f
        weight = ratio(proximal, b)
        r = ratio(p, proximal)
        losses.append(-weight * min(r * a, clip(r, 0.8, 1.2) * a) if weight <= 5 else 0.0)
    return losses


def exact_decoupled(policy, behavior, advantages, frozen, staleness):
    return decoupled(policy, behavior, advantages, frozen, [0] * len(policy))
