"""Each loss finds the best answer of a two-token bandit, from data that are up to two updates old; so does PPO with a
critic and several updates on a batch; a policy without rewards finds its teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from astraflow.algorithms.aggregate import coefficients
from astraflow.algorithms.corrections import Corrected, Mask, Reject, Truncate
from astraflow.algorithms.gae import gae, value_losses
from astraflow.algorithms.kl import kl_estimates
from astraflow.algorithms.losses.cispo import Cispo
from astraflow.algorithms.losses.contract import TrainedTokens
from astraflow.algorithms.losses.decoupled_ppo import DecoupledPpo
from astraflow.algorithms.losses.gspo import Gspo
from astraflow.algorithms.losses.m2po import M2po
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.algorithms.losses.reinforce import Reinforce
from astraflow.algorithms.losses.sapo import Sapo

ARMS, PLAYS, UPDATES, EVERY = 5, 64, 120, 3
REWARDS = torch.tensor([[0.0, 0.2, 0.1, 0.3, 0.1], [0.1, 0.0, 0.4, 0.1, 0.2]])  # [token, arm]: best are 3, then 2


@pytest.mark.parametrize(
    "loss",
    [
        PpoClip(), PpoClip(0.2, 0.28, 3.0, "sequence"), PpoClip(aggregation=2), M2po(), M2po(tokens="all"),
        Reinforce(), Gspo(), Cispo(), Sapo(), DecoupledPpo(), DecoupledPpo(proximal="exact"),
        Corrected(Reinforce(), [Truncate()]),
        Corrected(Reinforce(), [Mask(level="sequence")]), Corrected(PpoClip(), [Reject()]),
    ],
    ids=lambda loss: type(loss).__name__,
)  # fmt: skip
def test_the_best_answer_is_found(loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(2, ARMS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    behavior = logits.detach().log_softmax(-1)
    for update in range(UPDATES):
        if update % EVERY == 0:
            behavior = logits.detach().log_softmax(-1)
        arms = torch.multinomial(behavior.exp(), PLAYS, replacement=True, generator=generator)  # [token, play]
        rewards = REWARDS.gather(1, arms).sum(0)
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).repeat_interleave(2)
        tokens = TrainedTokens.of(
            logits.log_softmax(-1).gather(1, arms).T.flatten(),
            behavior.gather(1, arms).T.flatten(),
            advantages,
            torch.full((PLAYS,), 2),
            torch.full((2 * PLAYS,), float(update % EVERY)),
        )
        losses, _ = loss(tokens)
        weights = torch.ones(2 * PLAYS)
        factors = coefficients(loss.aggregation, weights, tokens.lengths[tokens.sequences], 2 * PLAYS, PLAYS)
        optimizer.zero_grad()
        (factors * losses).sum().backward()
        optimizer.step()
    best = logits.softmax(-1)[torch.arange(2), REWARDS.argmax(1)]
    assert best.prod() > 0.8


@pytest.mark.parametrize(("lam", "clip"), [(1.0, 0.0), (0.9, 0.2), (0.0, 0.2)])
def test_the_best_answer_is_found_with_a_critic(lam, clip):
    """PPO: a reward at the end only, a table of values, 4 epochs of 2 minibatches on each batch."""
    generator = torch.Generator().manual_seed(0)
    logits, table = torch.zeros(2, ARMS, requires_grad=True), torch.zeros(1 + ARMS, requires_grad=True)
    optimizer, of_critic = torch.optim.Adam([logits], lr=0.05), torch.optim.Adam([table], lr=0.05)
    loss = PpoClip()
    for _ in range(30):
        behavior = logits.detach().log_softmax(-1)
        arms = torch.multinomial(behavior.exp(), PLAYS, replacement=True, generator=generator)  # [token, play]
        rewards = torch.stack([torch.zeros(PLAYS), REWARDS.gather(1, arms).sum(0)]).T.flatten()
        states = torch.stack([torch.zeros(PLAYS, dtype=torch.int64), 1 + arms[0]]).T.flatten()  # the first arm is seen
        values = table.detach()[states]
        last = np.tile([False, True], PLAYS)
        credit = torch.from_numpy(gae(rewards.numpy(), values.numpy(), last, 1.0, lam)).float()
        targets, advantages = values + credit, (credit - credit.mean()) / credit.std()
        for _ in range(4):
            for part in torch.randperm(PLAYS, generator=generator).chunk(2):
                at = torch.stack([2 * part, 2 * part + 1]).T.flatten()
                tokens = TrainedTokens.of(
                    logits.log_softmax(-1).gather(1, arms).T.flatten()[at], behavior.gather(1, arms).T.flatten()[at],
                    advantages[at], torch.full((len(part),), 2),
                )  # fmt: skip
                optimizer.zero_grad()
                loss(tokens)[0].mean().backward()
                optimizer.step()
                of_critic.zero_grad()
                value_losses(table[states[at]], values[at], targets[at], clip)[0].mean().backward()
                of_critic.step()
    best = logits.softmax(-1)[torch.arange(2), REWARDS.argmax(1)]
    assert best.prod() > 0.8
    assert table[0].item() == pytest.approx(0.7, abs=0.15), "the critic knows what the best answer brings"


@pytest.mark.parametrize(
    "loss", [Reinforce(), PpoClip(), Corrected(Reinforce(), [Truncate()])], ids=lambda x: type(x).__name__
)
def test_a_teacher_is_imitated(loss):
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(2, ARMS, generator=generator).log_softmax(-1)
    logits = torch.zeros(2, ARMS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    distances = []
    for update in range(150):
        if update % EVERY == 0:
            behavior = logits.detach().log_softmax(-1)
        arms = torch.multinomial(behavior.exp(), PLAYS, replacement=True, generator=generator)
        sampled = behavior.gather(1, arms).T.flatten()
        tokens = TrainedTokens.of(
            logits.log_softmax(-1).gather(1, arms).T.flatten(), sampled,
            -kl_estimates(sampled, teacher.gather(1, arms).T.flatten(), "k1"), torch.full((PLAYS,), 2),
        )  # fmt: skip
        optimizer.zero_grad()
        loss(tokens)[0].mean().backward()
        optimizer.step()
        own = logits.detach().log_softmax(-1)
        distances.append((own.exp() * (own - teacher)).sum(-1).mean().item())
    assert distances[0] > 0.1 > 0.02 > distances[-1]
