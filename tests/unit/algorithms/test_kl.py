"""Estimators of the KL to a reference: their formulas, and what their gradients are on average."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from astraflow.algorithms.importance import MAX_LOG_RATIO
from astraflow.algorithms.kl import ESTIMATORS, kl_estimates, kl_to_go

FORMULAS = {
    "k1": lambda r: -math.log(r),
    "k2": lambda r: 0.5 * math.log(r) ** 2,
    "k3": lambda r: (r - 1) - math.log(r),
}  # of r = ref / pi


def _categorical() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, with gradient, and logprobs of a reference."""
    generator = torch.Generator().manual_seed(3)
    logits, reference = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1)


@pytest.mark.parametrize("name", FORMULAS)
def test_values_are_those_of_the_formulas(name: str) -> None:
    policy, reference = torch.log(torch.tensor([0.5, 0.1, 0.3, 0.9])), torch.log(torch.tensor([0.5, 0.4, 0.01, 0.8]))
    expected = [FORMULAS[name](math.exp(r - p)) for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    assert kl_estimates(policy, reference, name).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert set(ESTIMATORS) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    policy = torch.tensor([-0.2, -3.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.9, -0.5, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: kl_estimates(p, reference, name), [policy])


def test_the_mean_of_k1_and_k3_is_the_kl() -> None:
    logits, reference = _categorical()
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    for name in ("k1", "k3"):
        assert (logprobs.exp() * kl_estimates(logprobs, reference, name)).sum().item() == pytest.approx(kl.item())


def test_mean_gradients_in_a_loss_are_as_the_table_says() -> None:
    logits, reference = _categorical()

    def mean_gradient(name: str) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        loss = (logprobs.exp().detach() * kl_estimates(logprobs, reference, name)).sum()
        return torch.autograd.grad(loss, logits)[0]

    logprobs = logits.log_softmax(-1)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    forward = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)[0]
    assert mean_gradient("k1").abs().max() < 1e-12
    torch.testing.assert_close(mean_gradient("k2"), reverse)
    torch.testing.assert_close(mean_gradient("k3"), forward)


def test_a_token_without_any_chance_stays_finite() -> None:
    policy = torch.tensor([-500.0, 0.0], requires_grad=True)
    estimates = kl_estimates(policy, torch.tensor([0.0, -500.0]), "k3")
    estimates.sum().backward()
    assert estimates.isfinite().all() and policy.grad is not None and policy.grad.isfinite().all()
    assert estimates[1].item() == pytest.approx(MAX_LOG_RATIO - 1)


def test_what_is_to_go_is_summed_to_the_end_of_each_sequence() -> None:
    estimates, sequences = np.array([1.0, 2.0, 4.0, -8.0, 16.0, 32.0]), np.array([0, 0, 0, 1, 2, 2])
    assert kl_to_go(estimates, sequences).tolist() == [7, 6, 4, -8, 48, 32]
    assert len(kl_to_go(estimates[:0], sequences[:0])) == 0


def test_the_credit_of_a_teacher_gives_the_gradient_of_the_reverse_kl() -> None:
    """E over x ~ pi of -A grad log pi, with A = log q - log pi of each token, is grad KL(pi, q)."""
    logits, teacher = _categorical()
    logprobs = logits.log_softmax(-1)
    reverse = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)[0]
    credit = -kl_estimates(logprobs.detach(), teacher, "k1")
    mean = torch.autograd.grad((logprobs.exp().detach() * (-credit * logprobs)).sum(), logits)[0]
    torch.testing.assert_close(mean, reverse)
