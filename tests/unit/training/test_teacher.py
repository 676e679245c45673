"""Distillation on the own samples of a policy: credit of each token, the teacher of a run, and that it is followed."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.algorithms.losses.reinforce import Reinforce
from astraflow.config.schema import AlgorithmSection, KlSection, OptimizerSection
from astraflow.errors import ModelError, TrainingError
from astraflow.models.load import load_model
from astraflow.models.scoring.forward import prepare_model
from astraflow.models.scoring.packing import rows_from_table
from astraflow.testing.engines.effective import random_batch, run_config, write_model
from astraflow.training.learner import Learner
from astraflow.training.optimize.minibatches import placed_packs
from astraflow.training.reference import KlPenalty, Reference
from astraflow.training.step import Stepper, StepSettings
from plain_scores import sampled_rows

SECTION = AlgorithmSection(distill={"teacher": "t", "coef": 2.0}).penalty


def test_the_teacher_is_a_reference_with_the_kl_as_reward_of_each_token():
    assert KlSection(coef=2.0, place="reward", estimator="k1", reference="t") == SECTION
    assert AlgorithmSection().penalty is None and AlgorithmSection(kl={}).penalty == KlSection()


def test_the_credit_of_a_token_is_its_own_distance(make_table, random_rows):
    """Beside that of rewards, by hand: A + coef * (log q - log mu), no sum over later tokens, no baseline."""
    listed = random_rows([9, 17, 30])
    rows = rows_from_table(make_table(listed))
    teacher = np.random.default_rng(0).normal(-2, 1, len(rows.trained)).astype(np.float32)
    placed = placed_packs(replace(rows, ref_logprobs=teacher), 20)
    packs = KlPenalty(SECTION, 1.0, to_go=False).prepare(placed.packs, lambda score: [])
    for pack, before, places in zip(packs, placed.packs, placed.places, strict=True):
        expected = before.advantages + 2.0 * (teacher[places] - before.behavior_logprobs)
        assert pack.advantages == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [Reinforce(), PpoClip()], ids=lambda loss: type(loss).__name__)
def test_a_policy_follows_its_teacher(make_model, make_table, loss):
    """Replies of three tokens, sampled by the policy as it is."""
    model, teacher = make_model(), prepare_model(make_model())
    settings = StepSettings(OptimizerSection(lr=2e-3), total_steps=100, tokens_per_microbatch=10_000)
    stepper = Stepper(copy.deepcopy(model), loss, settings)
    stepper.penalty = KlPenalty(SECTION, 1.0, Reference(teacher), to_go=False)
    distances = []
    for _ in range(30):
        ids, logprobs = sampled_rows(stepper.model, 64)
        listed = [(row, [False, True, True, True]) for row in ids.numpy()]
        table = make_table(listed, behavior_logprobs=list(logprobs.numpy()), advantages=[np.zeros(4, np.float32)] * 64)
        distances.append(stepper.step(rows_from_table(table), 0)["policy/kl_k1"])
    assert np.mean(distances[-3:]) < 0.5 * np.mean(distances[:3]), distances


@pytest.fixture
def start(tmp_path):
    """A learner of a policy with the teacher in `tmp_path / "teacher"`, another model of its shape."""
    model, made = write_model(tmp_path / "model", tied=True), []
    with torch.no_grad():
        teacher = load_model(shutil.copytree(tmp_path / "model", tmp_path / "teacher"))
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    teacher.save_pretrained(tmp_path / "teacher")

    def make(teacher=str(tmp_path / "teacher"), where="run", **policy):
        algorithm = {"advantage": "distill", "loss": "reinforce", "distill": {"teacher": teacher}}
        section = {"optimizer": {"lr": 1e-2}, "algorithm": algorithm, **policy}
        made.append(Learner(run_config(model, section), "actor", tmp_path / where))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


@pytest.mark.parametrize("policy", [{}, {"lora": {"rank": 4, "alpha": 6}}, {"batch": {"epochs": 2}}])
def test_a_run_scores_its_teacher(start, policy):
    learner = start(**policy)
    assert learner.stepper.penalty.to_go is False
    first = learner.train(random_batch(0))
    assert first["policy/kl_k2"] > 1e-3 and first["grad_norm"] > 0 and "perf/reference_s" in first


def test_a_teacher_with_another_vocabulary_is_refused(start, tmp_path):
    path = tmp_path / "teacher" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"7"', '"é"'), encoding="utf-8")
    with pytest.raises(ModelError, match=r"algorithm\.distill\.teacher=.* has another vocabulary"):
        start()


def test_rows_without_the_column_of_a_stage_are_refused(make_model, make_table, random_rows):
    stepper = Stepper(make_model(), Reinforce(), StepSettings(OptimizerSection(), 10, 100))
    stepper.penalty = KlPenalty(SECTION, 1.0, to_go=False)
    with pytest.raises(TrainingError, match=r"batch\.ref_logprobs=missing"):
        stepper.step(rows_from_table(make_table(random_rows([9]))), 0)
