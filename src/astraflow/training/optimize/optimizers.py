"""Optimizers by name and the schedule of their learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from astraflow.config.schema import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 1 to `total_steps`): linear warm-up, then the schedule down to 0 (or flat)."""
    if step <= section.warmup_steps:
        return section.lr * step / (section.warmup_steps + 1)
    done = min(1.0, (step - 1 - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    match section.schedule:
        case "constant":
            return section.lr
        case "linear":
            return section.lr * (1 - done)
        case "cosine":
            return section.lr * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW over all parameters that are trained; matrices decay, vectors (norms, biases) do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )
