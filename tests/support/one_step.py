"""One optimizer step without a learning rate: the gradient that the optimizer was given."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from astraflow.algorithms.losses.contract import PolicyLoss
from astraflow.config.schema import OptimizerSection
from astraflow.models.scoring.packing import TokenRows
from astraflow.training.step import Stepper, StepSettings

VERSION = 5  # of the weights; rows are of older ones
OF_THE_CUT = ("microbatches", "microbatch_tokens/max", "computed_tokens", "context_tokens/mean")
"""Metrics that say how a batch was cut."""


def still_settings(budget: int = 10_000, lr: float = 0.0, grad_clip: float = 1.0, **more: Any) -> StepSettings:
    return StepSettings(
        OptimizerSection(lr=lr, grad_clip=grad_clip), total_steps=10, tokens_per_microbatch=budget, **more
    )


def gradient_of_step(
    model: PreTrainedModel, loss: PolicyLoss, rows: TokenRows, settings: StepSettings
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics, and the gradient of all that is trained, flat in the order of the parameters. `model` stays as it is."""
    stepper = Stepper(copy.deepcopy(model), loss, settings)
    seen: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        trained = [p for p in stepper.model.parameters() if p.requires_grad]
        seen.append(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))

    stepper.optimizer.register_step_pre_hook(keep)
    metrics = stepper.step(rows, VERSION)
    return metrics, seen[0]
