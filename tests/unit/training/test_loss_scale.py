"""float16: small gradients survive, overflow is computed again with half the scale, and nothing is skipped for it."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import OptimizerSection
from astraflow.models.scoring.packing import rows_from_table
from astraflow.training.optimize import loss_scale
from astraflow.training.optimize.loss_scale import LossScale
from astraflow.training.step import Stepper, StepSettings


def _settings(**more):
    return StepSettings(OptimizerSection(lr=1e-3), 10, 10_000, **more)


@pytest.fixture
def rows(make_table, random_rows):
    listed, draw = random_rows([12, 30, 9]), np.random.default_rng(0)
    return rows_from_table(
        make_table(listed, advantages=[np.full(len(ids), draw.normal(), np.float32) for ids, _ in listed])
    )


def _gradient(model, rows, advantage_factor=1.0, scale=None, **more):
    stepper, seen = Stepper(copy.deepcopy(model), PpoClip(0.9, 99.0), _settings(**more)), []
    if scale is not None:
        stepper.counts.scale = LossScale(scale)
    stepper.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]])
        )
    )
    metrics = stepper.step(replace(rows, advantages=rows.advantages * np.float32(advantage_factor)), 0)
    return seen[0], metrics, stepper


def test_the_gradient_is_that_of_float32_nearly_and_small_ones_survive(make_model, rows):
    model = make_model("llama")
    for factor in (1.0, 1e-6):
        settings = {"advantage_factor": factor}
        exact, _, _ = _gradient(model, rows, **settings)
        rough, metrics, _ = _gradient(model, rows, arithmetic="float16", **settings)
        assert (rough - exact).norm() / exact.norm() < 0.02 and metrics["skipped_steps"] == 0
        assert not torch.equal(rough, exact) and metrics["loss_scale"] > 1
    plain, _, _ = _gradient(model, rows, 1e-6, scale=1.0, arithmetic="float16")
    assert (plain - exact).norm() / exact.norm() > 0.2, "without a scale they should be lost, or this shows nothing"


def test_an_overflow_is_computed_again_with_half_the_scale(make_model, rows):
    model = make_model("llama")
    _, metrics, stepper = _gradient(model, rows, scale=2.0**40, arithmetic="float16")
    assert 1 <= metrics["loss_scale"] < 2.0**40 and metrics["skipped_steps"] == 0 and metrics["updates"] == 1
    assert np.isfinite(metrics["grad_norm"]) and stepper.counts.skipped == 0
    assert stepper.counts.scale.good_updates == 1, "the good update counts towards the next doubling"


def test_without_float16_the_scale_stays_as_it_is(make_model, rows):
    _, _, stepper = _gradient(make_model("llama"), rows)
    assert stepper.counts.scale == LossScale()


def test_a_loss_that_is_not_finite_is_not_the_fault_of_the_scale(make_model, rows):
    stepper = Stepper(make_model("llama"), PpoClip(), _settings(arithmetic="float16"))
    stepper.step(replace(rows, advantages=np.full_like(rows.advantages, np.nan)), 0)
    assert stepper.counts.skipped == 1 and stepper.counts.scale == LossScale()


def test_the_scale_grows_after_good_updates_and_ends_at_one(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    scale = LossScale(4.0)
    for _ in range(5):
        scale.held()
    assert scale == LossScale(8.0, 2)
    assert [scale.lowered() for _ in range(4)] == [True, True, True, False] and scale == LossScale(1.0, 0)
