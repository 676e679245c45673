"""Optimizers by name and the schedule of their learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from astraflow.config.schema import OptimizerSection
from astraflow.training.optimize.adamw_8bit import AdamW8bit


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 1 to `total_steps`): linear warm-up, then the schedule.

    With s the share of the steps after the warm-up that is done before this one and m = min_lr_ratio, it is lr times

    constant: 1; linear: m + (1 - m) (1 - s); cosine: m + (1 - m) (1 + cos(pi s)) / 2 (arXiv:1608.03983);
    wsd: 1, but m + (1 - m) (1 - sqrt(s')) in the last `decay_steps`, s' the share of those (arXiv:2405.18392).
    """
    if step <= section.warmup_steps:
        return section.lr * step / (section.warmup_steps + 1)
    start = section.warmup_steps
    if section.schedule == "wsd":
        start = max(start, total_steps - (section.decay_steps or math.ceil(0.2 * total_steps)))
    done = min(1.0, max(0.0, (step - 1 - start) / max(1, total_steps - start)))
    match section.schedule:
        case "constant":
            left = 1.0
        case "linear":
            left = 1 - done
        case "cosine":
            left = 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":
            left = 1 - math.sqrt(done)
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * left)


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer of all parameters that are trained; matrices decay, vectors (norms, biases) do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": own} for own in _by_ranks(matrices)]
    groups += [{"params": own, "weight_decay": 0.0} for own in _by_ranks(vectors)]
    lr, betas, eps, decay = section.lr, section.betas, section.eps, section.weight_decay
    match section.type:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=True)
        case "adamw_8bit":
            return AdamW8bit(groups, lr=lr, betas=betas, eps=eps, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=section.momentum, weight_decay=decay)


def _by_ranks(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that the same ranks hold parts of together, as a fused update wants them."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = None
        if type(parameter) is not nn.Parameter:  # whose parts
            from torch.distributed.tensor import DTensor  # a second to load

            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


def moments_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What the optimizer keeps for each parameter once it has taken a step; the first has the parameter's shape."""
    if isinstance(optimizer, AdamW8bit):
        return ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "step")
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if any(group["momentum"] for group in optimizer.param_groups) else ()
    return ("exp_avg", "exp_avg_sq", "step")
