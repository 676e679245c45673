"""How a model is scored: whole in this process, or spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.models.load import load_tensors
from astraflow.models.scoring.forward import PackedPolicy, Scores, packed_logprobs
from astraflow.models.scoring.packing import Pack
from astraflow.training.parallel.loading import Stored
from astraflow.training.parallel.ranks import Ranks


class Scoring(Protocol):
    """The logprobs of one model."""

    def __call__(self, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None) -> Scores:
        """The N trained tokens of `pack`, all [N] float32; under `weights` (by Hugging Face name) when given."""

    def itself(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one sequence [T] by the model's own forward pass, without gradient."""


class WholePolicy:
    """A model that this process has all of."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None) -> Scores:
        """See `Scoring`."""
        device = self._model.device
        there = None if weights is None else {name: tensor.to(device) for name, tensor in weights.items()}
        return packed_logprobs(self._model, pack, temperature, there)

    @torch.no_grad()
    def itself(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Scoring`."""
        return PackedPolicy(self._model).itself(token_ids)


def clipped_norm(model: nn.Module, most: float, ranks: Ranks) -> torch.Tensor:
    """Norm of the gradient of the whole model as it was, float32; above `most` the gradient is scaled down to it."""
    if not ranks.many:
        return nn.utils.clip_grad_norm_(model.parameters(), most).float()
    from astraflow.training.parallel.sharding import clipped_parts

    return clipped_parts(model, most).float()


def load_whole(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """`load_tensors`, of a model that may be spread over the ranks; each gives all tensors."""
    if not ranks.many:
        load_tensors(model, tensors)
        return
    from astraflow.training.parallel.sharding import load_parts

    load_parts(model, tensors)


def scoring_of(model: PreTrainedModel, ranks: Ranks, stored: Stored | None = None) -> Scoring:
    """The scoring of `model`, whose weights are spread over the ranks in place where there are several.

    Called on all ranks at once. Args: stored: where they are read from if the model is laid out only (`loading`);
    None: each rank has the whole model.
    """
    if not ranks.many:
        return WholePolicy(model)
    from astraflow.training.parallel.sharding import ShardedPolicy  # a second to load

    return ShardedPolicy(model, ranks, stored)
