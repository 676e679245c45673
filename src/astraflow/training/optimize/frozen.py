"""Parts of a model that keep their weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from astraflow.errors import ModelError
from astraflow.models.stored import in_part


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """What lies in one of `parts` (see `in_part`) gets no gradient and no moments. Tied weights are one.

    Raises: ModelError: a part is none of `model`, or nothing is left.
    """
    parameters = dict(model.named_parameters())
    for part in parts:
        for name in in_part(part, parameters):
            parameters[name].requires_grad_(False)
    if parts and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError("trainer.frozen", list(parts), "leaves nothing to train", "name fewer parts")
