"""A critic beside a policy: the order of sampled tokens, credit by GAE, what it learns, and that it is resumed."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import CriticSection, KlSection, OptimizerSection, RunConfig
from astraflow.errors import ModelError, TrainingError
from astraflow.models.load import load_model
from astraflow.models.scoring.packing import rows_from_table
from astraflow.training import learner as learners
from astraflow.training.credit import critic as critics
from astraflow.training.credit.chains import chains_of, with_rewards
from astraflow.training.credit.critic import Critic
from astraflow.training.learner import Learner
from astraflow.training.parallel.ranks import ALONE
from astraflow.training.reference import KlPenalty
from astraflow.training.step import Stepper, StepSettings

OPTIMIZER = OptimizerSection(lr=1e-3, eps=1e-3)


@pytest.fixture
def episodes(make_table):
    """Two episodes of rewards per call. The first: calls 0 and 1 in one branch with an observation (token 9) between
    them, call 2 in a fork. The second: one call."""
    rows = [
        ([5, 5, 11, 12, 9, 13, 14], [0, 0, 1, 1, 0, 1, 1]),
        ([15, 16], [1, 1]),
        ([5, 5, 17], [0, 0, 1]),
    ]
    return make_table(
        rows,
        episode_id=["train/0/0/0", "train/0/0/0", "train/0/0/1"],
        branch=[0, 1, 0],
        parent_branch=[-1, 0, -1],
        fork_at=[0, 3, 0],
        call_index=[[-1, -1, 0, 0, -1, 1, 1], [2, 2], [-1, -1, 0]],
        advantages=[[0, 0, 0.5, 0.5, 0, 0.25, 0.25], [2.0, 2.0], [0, 0, 3.0]],
        versions=[[-1, -1, 0, 0, -1, 0, 0], [0, 0], [-1, -1, 0]],
    )


def test_tokens_of_an_episode_are_a_chain_over_calls_and_branches(episodes):
    rows = rows_from_table(episodes)
    chains = chains_of(episodes, rows)
    assert rows.token_ids[chains.places].tolist() == [11, 12, 13, 14, 15, 16, 17]
    assert chains.last_of_call.tolist() == [False, True, False, True, False, True, True]
    assert chains.last.tolist() == [False] * 5 + [True, True]
    rewards = with_rewards(rows, chains).advantages
    assert rewards[chains.places].tolist() == [0, 0.5, 0, 0.25, 0, 2, 3] and rewards.sum() == 5.75


def test_the_order_is_that_of_the_calls_whatever_that_of_the_rows(episodes):
    shuffled = episodes.take(pa.array([1, 2, 0]))
    rows = rows_from_table(shuffled)
    chains = chains_of(shuffled, rows)
    assert rows.token_ids[chains.places].tolist() == [11, 12, 13, 14, 15, 16, 17]


def test_rows_that_are_not_trained_are_in_no_chain(episodes):
    at = episodes.column_names.index("weight")
    table = episodes.set_column(at, "weight", pa.array([1.0, 1.0, 0.0], pa.float32()))
    rows = rows_from_table(table)
    assert rows.token_ids[chains_of(table, rows).places].tolist() == [11, 12, 13, 14, 15, 16]


def _stepper(directory, section, **more):
    settings = StepSettings(OPTIMIZER, 20, 64, **more)
    stepper = Stepper(load_model(directory), PpoClip(), settings)
    stepper.critic = Critic(section, OPTIMIZER, 20, directory)
    return stepper


def _step(stepper, table, version=0):
    rows = rows_from_table(table)
    return stepper.step(rows, version, None, chains_of(table, rows))


def _weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_critic_that_knows_nothing_leaves_the_discounted_return(tiny_char, episodes):
    seen = []

    class Seeing(PpoClip):
        def __call__(self, tokens, prepared=None):
            seen.append(tokens.advantages)
            return super().__call__(tokens, prepared)

    section = CriticSection(lam=1.0, gamma=0.5, normalize=False)
    stepper = _stepper(tiny_char, section)
    stepper.loss = Seeing()
    metrics = _step(stepper, episodes)
    returns = [0.5 * 0.5 + 0.5**3 * 0.25 + 0.5**5 * 2, 0.5 + 0.5**2 * 0.25 + 0.5**4 * 2, 0.5 * 0.25 + 0.5**3 * 2]
    returns += [0.25 + 0.5**2 * 2, 0.5 * 2, 2.0, 3.0]
    assert sorted(torch.cat(seen).tolist()) == pytest.approx(sorted(returns))
    assert metrics["critic/value"] == 0 and metrics["critic/return"] == pytest.approx(np.mean(returns))
    assert metrics["advantage/std"] == pytest.approx(np.std(returns), rel=1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(0)
    assert metrics["critic/loss"] == pytest.approx(np.mean(np.square(returns)) / 2, rel=1e-5)


def _judged(tiny_char, table, **settings):
    """Advantages of the rows and targets by a critic that says something."""
    critic = Critic(CriticSection(**settings), OPTIMIZER, 20, tiny_char)
    torch.nn.init.normal_(critic.model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return _said(critic, _stepper(tiny_char, CriticSection()), table)


def _said(critic, stepper, table):
    rows = rows_from_table(table)
    chains, placed = chains_of(table, rows), stepper._placed(rows, None)
    given = with_rewards(rows, chains)
    judged_rows, judged, _ = critic.judge(given, chains, placed, lambda score: stepper.scored(placed, score))
    at = chains.places
    return judged_rows.advantages[at], judged.targets[at], judged.before[at]


def test_advantages_are_normalised_and_targets_are_not(tiny_char, episodes):
    raw, targets, said = _judged(tiny_char, episodes, normalize=False)
    assert targets == pytest.approx(said + raw, abs=1e-5) and said.std() > 0.1
    normal, same, _ = _judged(tiny_char, episodes)
    assert normal == pytest.approx((raw - raw.mean()) / raw.std(), abs=1e-5) and same == pytest.approx(targets)


def test_targets_may_look_further_than_advantages(tiny_char, episodes):
    short, _, said = _judged(tiny_char, episodes, lam=0.0, normalize=False)
    advantages, targets, _ = _judged(tiny_char, episodes, lam=0.0, target_lam=1.0, normalize=False)
    assert advantages == pytest.approx(short) and targets == pytest.approx([2.75, 2.75, 2.25, 2.25, 2, 2, 3], abs=1e-5)
    assert said + short != pytest.approx(targets, abs=0.05)


def test_a_critic_learns_what_its_rewards_are(tiny_char, make_table, random_rows):
    """The reward of an episode is in its first token; after some steps the critic says it."""
    rows = random_rows([12] * 12)
    good = [i % 2 for i in range(12)]
    for (ids, _), g in zip(rows, good, strict=True):
        ids[0] = 3 + 20 * g
    table = make_table(rows, advantages=[np.full(12, g, np.float32) for g in good])
    stepper = _stepper(tiny_char, CriticSection(lr=3e-3, clip=0, warmup_steps=20), epochs=2)
    before = _weights(stepper.model)
    metrics = [_step(stepper, table) for _ in range(15)]
    assert metrics[0]["critic/explained_variance"] < 0.1 < 0.8 < metrics[-1]["critic/explained_variance"]
    assert metrics[-1]["critic/loss"] < 0.2 * metrics[0]["critic/loss"]
    assert metrics[0]["lr"] == 0 and torch.equal(_weights(stepper.model), before), "the policy waits for the critic"
    assert metrics[-1]["critic/lr"] == 3e-3 and metrics[-1]["critic/grad_norm"] > 0


def test_an_update_of_the_critic_is_that_of_a_plain_loop(tiny_char, make_table, random_rows):
    """One sequence at a time in float64, its own AdamW; also cut into microbatches, and minibatches of the policy."""
    listed, weights = random_rows([9, 30, 14]), (1.0, 0.5, 2.0)
    rewards = [np.full(len(ids), i + 0.5, np.float32) for i, (ids, _) in enumerate(listed)]
    table = make_table(listed, advantages=rewards, weight=weights)
    for budget in (1, 10_000):
        stepper = _stepper(tiny_char, CriticSection(lr=1e-3, clip=0, lam=1.0, normalize=False))
        stepper.settings = replace(stepper.settings, tokens_per_microbatch=budget)
        critic = stepper.critic
        torch.nn.init.normal_(critic.model.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
        start, plain = _weights(critic.model), copy.deepcopy(critic.model).double()
        plain.decoder.set_attn_implementation("eager")
        _step(stepper, table)
        losses = 0.0
        for (ids, mask), reward, weight in zip(listed, (0.5, 1.5, 2.5), weights, strict=True):
            states = plain.decoder(torch.as_tensor(ids)[None]).last_hidden_state[0]
            values = plain.head(states)[:-1, 0][torch.as_tensor(mask[1:])]
            losses = losses + weight * (values - reward).square().sum() / 2
        (losses / sum(mask.sum() for _, mask in listed)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), OPTIMIZER.grad_clip)
        groups = ([p for p in plain.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False))
        torch.optim.AdamW(
            [{"params": g} for g in groups], lr=1e-3, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0
        ).step()
        moved, wanted = _weights(critic.model) - start, _weights(plain).float() - start
        assert (moved - wanted).norm() / wanted.norm() < 1e-3


def test_a_value_gains_nothing_from_moving_further_than_the_clip(tiny_char, episodes):
    moved = {}
    for clip in (0.05, 0.0):
        stepper = _stepper(tiny_char, CriticSection(lr=3e-3, clip=clip, lam=1.0), epochs=20)
        metrics = _step(stepper, episodes)
        _, _, said = _said(stepper.critic, stepper, episodes)
        moved[clip] = float(np.abs(said).max())
        assert (metrics["critic/clip_fraction"] > 0.3) is (clip > 0)
    assert moved[0.05] < 0.7 * moved[0.0], "momentum carries on, but nothing pulls"


def test_a_kl_in_the_reward_is_a_reward_of_each_token(tiny_char, episodes):
    """Its sum over what follows is what GAE makes of it, not what the penalty does without a critic."""
    rows = rows_from_table(episodes)
    reference = np.full(len(rows.trained), -2.0, np.float32)  # behaviour has -1: a KL of 1 by k1
    section, seen = CriticSection(lam=1.0, normalize=False), []
    for coef in (1e-9, 0.5):
        stepper = _stepper(tiny_char, section)
        stepper.penalty = KlPenalty(KlSection(coef=coef, place="reward"), 1.0, to_go=False)
        metrics = stepper.step(replace(rows, ref_logprobs=reference), 0, None, chains_of(episodes, rows))
        seen.append(metrics["critic/return"])
    to_go = [6, 5, 4, 3, 2, 1, 1]
    assert seen[0] - seen[1] == pytest.approx(0.5 * np.mean(to_go), rel=1e-5)


def test_a_critic_that_is_not_finite_is_not_updated_and_ends_at_the_third_time(tiny_char, episodes):
    critic = Critic(CriticSection(), OPTIMIZER, 20, tiny_char)
    stepper = _stepper(tiny_char, CriticSection())
    stepper.critic, before = critic, _weights(critic.model)
    rows = rows_from_table(episodes)
    placed = stepper._placed(rows, None)
    broken = with_rewards(replace(rows, advantages=np.full_like(rows.advantages, np.nan)), chains_of(episodes, rows))
    _, judged, _ = critic.judge(broken, chains_of(episodes, rows), placed, lambda score: stepper.scored(placed, score))
    for _ in range(2):
        critic.update(placed, judged, 1, stepper._pass, ALONE)
    assert torch.equal(_weights(critic.model), before)
    with pytest.raises(TrainingError, match=r"critic/loss.*not finite 3 times in a row; lower critic.lr"):
        critic.update(placed, judged, 1, stepper._pass, ALONE)


@pytest.fixture
def make_config(tiny_char):
    def make(**policy):
        section = {
            "model": str(tiny_char),
            "batch": {"groups": 2, "tokens_per_microbatch": 64, "epochs": 2, "minibatches": 2},
            "optimizer": {"lr": 1e-3, "schedule": "linear"},
            "algorithm": {"advantage": "gae"},
            "critic": {"lr": 1e-3, "lam": 0.9, "target_lam": 1.0},
            "operators": [],
            **policy,
        }
        return RunConfig.model_validate(
            {
                "run": {"name": "r", "steps": 6, "seed": 4},
                "sources": {"train": {"type": "calculator"}},
                "workflow": {"type": "single_turn"},
                "policies": {"actor": section},
            }
        )

    return make


def test_a_resumed_critic_goes_on_bit_for_bit(make_config, episodes, tmp_path):
    config = make_config()
    whole = Learner(config, "actor", tmp_path / "whole")
    for _ in range(5):
        whole.train(episodes)
    first = Learner(config, "actor", tmp_path / "cut")
    for _ in range(3):
        first.train(episodes)
    whole.stepper.critic.skipped_in_a_row = first.stepper.critic.skipped_in_a_row = 2
    first.save()
    first.close()
    again = Learner(config, "actor", tmp_path / "cut")
    assert again.stepper.critic.skipped_in_a_row == 2, "a restart gives it no new tries"
    for _ in range(2):
        metrics = again.train(episodes)
    assert metrics["critic/loss"] > 0 and metrics["updates"] == 2
    assert torch.equal(_weights(whole.stepper.critic.model), _weights(again.stepper.critic.model))
    assert torch.equal(_weights(whole.model), _weights(again.model))
    whole.close(), again.close()


def test_an_update_that_the_critic_skips_counts_and_its_batch_is_kept(make_config, episodes, tmp_path, monkeypatch):
    def overflow(values, before, targets, clip):
        return values * np.inf, values > 0

    monkeypatch.setattr(critics, "value_losses", overflow)
    learner = Learner(make_config(batch={"groups": 2}), "actor", tmp_path)
    metrics = learner.train(episodes)
    learner.close()
    assert metrics["skipped_steps"] == 1 and np.isfinite(metrics["loss"]) and not np.isfinite(metrics["critic/loss"])
    assert [p.name for p in (tmp_path / "skipped_batches" / "actor").iterdir()] == ["step-000001.parquet"]


@pytest.mark.parametrize("of", ["Critic", "load_reference"])
def test_a_second_model_that_does_not_fit_into_memory_is_said(make_config, tmp_path, monkeypatch, of):
    def too_much(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(learners, of, too_much)
    config = make_config() if of == "Critic" else make_config(critic=None, algorithm={"kl": {}})
    with pytest.raises(TrainingError, match="memory=CUDA out of memory ran out while the model was loaded"):
        Learner(config, "actor", tmp_path)


def test_with_a_critic_a_kl_is_a_reward_of_each_token(make_config, tmp_path):
    for name, algorithm, critic, to_go in (
        ("critic", {"advantage": "gae", "kl": {"place": "reward"}}, {}, False),
        ("plain", {"kl": {"place": "reward"}}, None, True),
    ):
        learner = Learner(make_config(algorithm=algorithm, critic=critic), "actor", tmp_path / name)
        assert learner.stepper.penalty.to_go is to_go
        learner.close()


def test_a_checkpoint_without_the_critic_is_refused(make_config, episodes, tmp_path):
    plain = Learner(make_config(algorithm={}, critic=None), "actor", tmp_path)
    plain.train(episodes)
    plain.save()
    plain.close()
    with pytest.raises(TrainingError, match="checkpoint critic=0 tensors are not those of this critic"):
        Learner(make_config(), "actor", tmp_path)


def test_a_critic_with_other_tokens_is_refused(make_config, tiny_char, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_char.iterdir():
        text = path.read_bytes()
        (other / path.name).write_bytes(text.replace(b'"a"', b'"zz"') if path.name == "tokenizer.json" else text)
    with pytest.raises(ModelError, match=r"critic.model.*has another vocabulary"):
        Learner(make_config(critic={"model": str(other)}), "actor", tmp_path / "run")
