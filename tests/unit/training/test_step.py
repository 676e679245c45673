"""One optimizer step: its metrics, the schedule, and what happens to NaN. Its numbers: numbers/."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import OptimizerSection
from astraflow.errors import TrainingError
from astraflow.models.scoring.forward import packed_logprobs
from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.training.step import StepInterrupted, Stepper, StepSettings, learning_rate


def _settings(budget=10_000, lr=0.0, **more):
    return StepSettings(OptimizerSection(lr=lr), total_steps=10, tokens_per_microbatch=budget, **more)


def test_metrics_tell_what_the_batch_was(make_model, batch):
    metrics = Stepper(make_model(), PpoClip(), _settings()).step(batch, 5)
    assert metrics["tokens"] == batch.trained.sum() and metrics["sequences"] == 16
    assert metrics["staleness/max"] == 2 and 0.5 < metrics["staleness/mean"] < 1.5
    assert 0 < metrics["policy/clip_fraction"] <= 1 and metrics["policy/ratio_max"] > 1
    assert metrics["policy/approx_kl"] > 0 and metrics["policy/entropy"] > 0 and metrics["grad_norm"] > 0
    assert {"loss", "lr", "perf/step_s", "perf/tokens_per_s", "policy/ratio_mean"} <= set(metrics)


def test_an_entropy_bonus_keeps_entropy_up(make_model, batch):
    seen = {}
    for entropy in (0.0, 0.5):
        stepper = Stepper(
            make_model(), PpoClip(clip_low=0.9, clip_high=9.0), replace(_settings(lr=3e-3), entropy=entropy)
        )
        metrics = [stepper.step(batch, 5) for _ in range(6)]
        seen[entropy] = metrics[-1]["policy/entropy"]
    assert seen[0.5] > seen[0.0]


def test_a_z_loss_pulls_the_normaliser_to_one(make_model, batch):
    model, seen, first = make_model(), {}, {}
    for z_loss in (1e-9, 1.0):
        settings = replace(_settings(lr=1e-2), z_loss=z_loss)
        stepper = Stepper(copy.deepcopy(model), PpoClip(clip_low=0.9, clip_high=9.0), settings)
        (pack,) = pack_rows(batch, 10_000)
        with torch.no_grad():
            squares = packed_logprobs(stepper.model, pack, 1.0).log_norms.double().square()
        metrics = [stepper.step(batch, 5) for _ in range(8)]
        first[z_loss] = metrics[0]["loss"] - z_loss * float((torch.from_numpy(pack.weights) * squares).mean())
        seen[z_loss] = abs(metrics[-1]["policy/log_norm"])
    assert first[1.0] == pytest.approx(first[1e-9], abs=1e-3) and seen[1.0] < 0.7 * seen[1e-9]
    assert "policy/log_norm" not in Stepper(make_model(), PpoClip(), _settings()).step(batch, 5)


def test_steps_learn(make_model, batch):
    stepper = Stepper(make_model(), PpoClip(clip_low=0.9, clip_high=9.0), _settings(lr=3e-3))
    losses = [stepper.step(batch, 5)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1, 0.8535534, 0.5, 0.1464466]),
        ({"schedule": "linear", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 0.5]),
    ],
)
def test_the_learning_rate_follows_its_schedule(section, expected):
    optimizer = OptimizerSection(lr=2.0, **section)
    assert [learning_rate(optimizer, step, 4) / 2 for step in range(1, 5)] == pytest.approx(expected)


def test_vectors_do_not_decay(make_model):
    stepper = Stepper(make_model(), PpoClip(), StepSettings(OptimizerSection(weight_decay=0.1), 10, 100))
    decays = {p.ndim: group["weight_decay"] for group in stepper.optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_a_step_that_is_not_finite_is_skipped_and_the_third_in_a_row_ends(make_model, batch):
    broken = replace(batch, advantages=np.full_like(batch.advantages, np.nan))
    stepper = Stepper(make_model(), PpoClip(), _settings(lr=1e-3))
    before = {name: p.detach().clone() for name, p in stepper.model.named_parameters()}
    for _ in range(2):
        stepper.step(broken, 5)
    assert all(torch.equal(p, before[name]) for name, p in stepper.model.named_parameters())
    metrics = stepper.step(batch, 5)
    assert metrics["skipped_steps"] == 2 and stepper.counts.step == 3
    assert not all(torch.equal(p, before[name]) for name, p in stepper.model.named_parameters())
    for _ in range(2):
        stepper.step(broken, 5)  # a good step in between began a new count
    with pytest.raises(TrainingError, match="3 steps in a row"):
        stepper.step(broken, 5)


def test_a_batch_without_sampled_tokens_changes_nothing(make_model, make_table):
    stepper = Stepper(make_model(), PpoClip(), _settings(lr=1e-3))
    metrics = stepper.step(rows_from_table(make_table([([1, 2], [0, 0])])), 0)
    assert metrics["tokens"] == 0 and stepper.counts.step == 1 and not stepper.optimizer.state


def test_an_interrupted_step_leaves_no_trace(make_model, batch):
    asked = []
    stepper = Stepper(make_model(), PpoClip(), _settings(40, lr=1e-3), lambda: len(asked) > 2 or bool(asked.append(0)))
    before = {name: p.detach().clone() for name, p in stepper.model.named_parameters()}
    with pytest.raises(StepInterrupted):
        stepper.step(batch, 5)
    assert stepper.counts.step == 0
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in stepper.model.named_parameters())


def test_bfloat16_arithmetic_keeps_float32_weights_and_nearly_the_gradient(make_model, batch):
    model = make_model("llama")
    exact = Stepper(copy.deepcopy(model), PpoClip(0.9, 99.0), _settings())
    rough = Stepper(copy.deepcopy(model), PpoClip(0.9, 99.0), _settings(arithmetic="bfloat16"))
    a, b = exact.step(batch, 5), rough.step(batch, 5)
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())
    assert b["loss"] == pytest.approx(a["loss"], rel=0.2) and b["loss"] != a["loss"]
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.2)
