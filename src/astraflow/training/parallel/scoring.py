"""How a model is scored: whole in this process, or spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.models.scoring.forward import Scores, packed_logprobs
from astraflow.models.scoring.packing import Pack
from astraflow.training.parallel.ranks import Ranks


class Scoring(Protocol):
    """The logprobs of one model."""

    def __call__(self, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None) -> Scores:
        """The trained tokens of `pack`; under `weights` (by Hugging Face name) when given."""


def _whole(
    model: PreTrainedModel, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None
) -> Scores:
    device = model.device
    there = None if weights is None else {name: tensor.to(device) for name, tensor in weights.items()}
    return packed_logprobs(model, pack, temperature, there)


def clipped_norm(model: nn.Module, most: float, ranks: Ranks) -> torch.Tensor:
    """Norm of the gradient of the whole model as it was, float32; above `most` the gradient is scaled down to it."""
    if not ranks.many:
        return nn.utils.clip_grad_norm_(model.parameters(), most).float()
    from astraflow.training.parallel.sharding import clipped_parts

    return clipped_parts(model, most).float()


def scoring_of(model: PreTrainedModel, ranks: Ranks) -> Scoring:
    """The scoring of `model`, whose weights are spread over the ranks in place where there are several.

    Called on all ranks at once, each with the whole model.
    """
    if not ranks.many:
        return partial(_whole, model)
    from astraflow.training.parallel.sharding import ShardedPolicy  # a second to load

    return ShardedPolicy(model, ranks)
