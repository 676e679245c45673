"""Optimizers by name: against their formulas, the moments of one byte, schedules, and that checkpoints hold them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from astraflow.config.schema import OptimizerSection
from astraflow.errors import TrainingError
from astraflow.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from astraflow.training.optimize import adamw_8bit
from astraflow.training.optimize.adamw_8bit import BLOCK, SMALL, AdamW8bit, codes
from astraflow.training.optimize.optimizers import build_optimizer, learning_rate, moments_of

TYPES = [{"type": "adamw"}, {"type": "adamw_8bit"}, {"type": "sgd"}, {"type": "sgd", "momentum": 0.9}]


def _model(seed=0, wide=96):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, wide), nn.Tanh(), nn.Linear(wide, 1))


def _steps(model, optimizer, count, start=0):
    """Regression on fresh data of each step; the losses."""
    losses = []
    for step in range(start, start + count):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x)[:, 0] - x[:, :3].sum(1).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_256_rising_numbers_with_0_and_1(signed):
    table = codes(signed)
    assert len(table) == 256 == len(set(table.tolist())) and (table.diff() > 0).all()
    assert (
        {0.0, 1.0} <= set(table.tolist())
        and table.max() == 1
        and table.min() == pytest.approx(-0.993 if signed else 0.0, abs=1e-3)
    )
    gaps = table.diff()[table[:-1] > 0.1]
    assert gaps.max() < (0.9 / 64 if signed else 0.9 / 128) * 1.01, "near the largest codes are dense"


def test_the_first_update_is_that_of_adamw():
    """Nothing was rounded yet."""
    ours, theirs = _model(), _model()
    section = OptimizerSection(lr=1e-2, weight_decay=0.1)
    _steps(ours, build_optimizer(ours, section.model_copy(update={"type": "adamw_8bit"})), 1)
    _steps(theirs, build_optimizer(theirs, section), 1)
    torch.testing.assert_close(_weights(ours), _weights(theirs), rtol=1e-5, atol=1e-6)


def test_what_is_stored_is_near_and_never_0_where_a_second_moment_is_not():
    parameter = nn.Parameter(torch.zeros(5, 2 * BLOCK + 100, 2))
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) ** 5
    parameter.grad[0] = 1e-12
    optimizer = AdamW8bit([parameter], 1e-3, (0.9, 0.95), 1e-8, 0.0)
    optimizer.step()
    state, grad = optimizer.state[parameter], parameter.grad
    assert {name: t.dtype for name, t in state.items()} == {
        "step": torch.float32, "exp_avg": torch.uint8, "exp_avg_scale": torch.float32, "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scale": torch.float32,
    }  # fmt: skip
    for name, exact in (("exp_avg", 0.1 * grad), ("exp_avg_sq", 0.05 * grad.square())):
        stored = adamw_8bit._Stored(state, name, 0, len(parameter)).read()
        scale = state[f"{name}_scale"].repeat_interleave(BLOCK, 1)[:, : parameter[0].numel()].view_as(parameter)
        assert ((stored - exact).abs() <= 0.0071 * scale).all()
        large = exact.abs() > 0.01 * scale
        assert ((stored - exact).abs() <= 0.5 * exact.abs())[large].all()
    assert (stored > 0).all()


def test_small_parameters_keep_whole_moments():
    model = _model()
    optimizer = build_optimizer(model, OptimizerSection(type="adamw_8bit"))
    _steps(model, optimizer, 1)
    for parameter in model.parameters():
        assert (optimizer.state[parameter]["exp_avg"].dtype == torch.uint8) == (parameter.numel() >= SMALL)


def test_parts_of_a_large_parameter_are_updated_alike(monkeypatch):
    whole, parts = _model(), _model()
    section = OptimizerSection(type="adamw_8bit", lr=1e-2)
    _steps(whole, build_optimizer(whole, section), 3)
    monkeypatch.setattr(adamw_8bit, "CHUNK", 2 * BLOCK)
    _steps(parts, build_optimizer(parts, section), 3)
    assert torch.equal(_weights(whole), _weights(parts))


@pytest.mark.parametrize("settings", TYPES)
def test_each_learns_and_goes_on_bit_for_bit_from_what_a_checkpoint_holds(settings):
    section = OptimizerSection(lr=2e-2 * (1 - settings.get("momentum", 0.0)), **settings)
    model = _model()
    optimizer = build_optimizer(model, section)
    losses = _steps(model, optimizer, 150)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    saved = {name: t.clone() for name, t in optimizer_tensors(model, optimizer).items()}
    assert {name.partition("/")[0] for name in saved} == set(moments_of(optimizer))
    again = _model(1)
    again.load_state_dict(model.state_dict())
    resumed = build_optimizer(again, section)
    load_optimizer_tensors(again, resumed, saved)
    _steps(model, optimizer, 3, 150), _steps(again, resumed, 3, 150)
    assert torch.equal(_weights(model), _weights(again))


def test_eight_bits_learn_as_well_as_thirty_two():
    final = {}
    for name in ("adamw", "adamw_8bit"):
        model = _model()
        final[name] = sum(_steps(model, build_optimizer(model, OptimizerSection(type=name, lr=5e-3)), 300)[-20:])
    assert final["adamw_8bit"] < 1.1 * final["adamw"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_its_formula(momentum):
    model = _model()
    section = OptimizerSection(type="sgd", lr=0.1, momentum=momentum, weight_decay=0.01)
    expected, velocity = [p.detach().double() for p in model.parameters()], [0.0] * 4
    optimizer = build_optimizer(model, section)
    for step in range(3):
        _steps(model, optimizer, 1, step)
        for i, p in enumerate(model.parameters()):
            slope = p.grad.double() + (0.01 * expected[i] if p.ndim >= 2 else 0.0)
            velocity[i] = momentum * velocity[i] + slope
            expected[i] = expected[i] - 0.1 * velocity[i]
    torch.testing.assert_close(_weights(model), torch.cat([x.flatten() for x in expected]).float())


def test_a_checkpoint_of_another_optimizer_is_refused():
    model = _model()
    optimizer = build_optimizer(model, OptimizerSection())
    _steps(model, optimizer, 1)
    other = build_optimizer(model, OptimizerSection(type="adamw_8bit"))
    with pytest.raises(TrainingError, match=r"is missing or unknown; .* and its optimizer\.type"):
        load_optimizer_tensors(model, other, optimizer_tensors(model, optimizer))


def _rates(steps=10, **section):
    return [learning_rate(OptimizerSection(lr=1.0, **section), step, steps) for step in range(1, steps + 1)]


def test_wsd_is_flat_and_then_falls_by_the_square_root():
    flat = [1.0] * 6
    expected = [1 - math.sqrt(k / 4) for k in range(4)]
    assert _rates(schedule="wsd", decay_steps=4) == pytest.approx(flat + expected)
    assert _rates(schedule="wsd")[:9] == [1.0] * 9 and _rates(schedule="wsd")[9] == pytest.approx(1 - math.sqrt(0.5))
    warm = _rates(schedule="wsd", decay_steps=4, warmup_steps=3)
    assert _rates(schedule="wsd", warmup_steps=9)[9] == 1.0, "it does not fall before it has risen"
    assert warm[:7] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1]) and warm[7:] == pytest.approx(expected[1:])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_share_of_the_rate_is_left_at_the_end(schedule):
    plain = _rates(schedule=schedule, steps=40)
    assert _rates(schedule=schedule, steps=40, min_lr_ratio=0.1) == pytest.approx([0.1 + 0.9 * x for x in plain])
    assert learning_rate(OptimizerSection(lr=2.0, schedule=schedule, min_lr_ratio=0.1), 41, 40) == pytest.approx(0.2)
