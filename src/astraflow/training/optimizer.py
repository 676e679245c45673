"""AdamW, its learning rate, and its state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from astraflow.config.schema import OptimizerSection
from astraflow.errors import TrainingError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


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


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW over all parameters; matrices decay, vectors (norms, biases) do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `<moment>/<parameter name>` -> tensor; empty before the first step."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}/{name}"] = value
    return tensors


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Inverse of `optimizer_tensors`. Raises: TrainingError: a moment is missing, unknown or of another shape."""
    expected = {f"{moment}/{name}" for moment in MOMENTS for name, _ in model.named_parameters()} if tensors else set()
    if different := sorted(expected ^ set(tensors)):
        raise TrainingError(
            "checkpoint.optimizer", different[0], "is missing or unknown", "resume with the model that was checkpointed"
        )
    for name, parameter in model.named_parameters():
        if not tensors:
            continue
        state = {moment: tensors[f"{moment}/{name}"].clone() for moment in MOMENTS}
        if state["exp_avg"].shape != parameter.shape:
            raise TrainingError(
                f"checkpoint.optimizer.{name}.shape", tuple(state["exp_avg"].shape),
                f"must be {tuple(parameter.shape)}", "resume with the model that was checkpointed",
            )  # fmt: skip
        optimizer.state[parameter] = state
