"""What training must compute, said plainly: one row at a time, transformers' own attention, all logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.models.scoring.forward import prepare_model

Row = tuple[np.ndarray, np.ndarray]  # token ids, trained


def plain_logits(model: PreTrainedModel, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """[T - 1, V] of the tokens after the first, divided by the temperature."""
    tokens = torch.tensor(np.asarray(ids))[None].long()
    return model(input_ids=tokens, use_cache=False).logits[0, :-1].float() / temperature


def plain_logprobs(model: PreTrainedModel, rows: Sequence[Row], temperature: float = 1.0) -> list[torch.Tensor]:
    """Logprobs of the trained tokens of each row, differentiable."""
    found = []
    for ids, trained in rows:
        tokens = torch.tensor(np.asarray(ids)).long()
        chosen = plain_logits(model, ids, temperature).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(chosen[torch.tensor(np.asarray(trained, bool)[1:])])
    return found


def plain_gradient(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    """Of all parameters that are trained, flat."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


@torch.no_grad()
def sampled_rows(model: PreTrainedModel, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [size, 4] that start with 1, sampled by a model of a trainer, and their logprobs, 0 for the first."""
    ids, logprobs = torch.ones(size, 1, dtype=torch.int64), [torch.zeros(size)]
    for _ in range(3):
        model.set_attn_implementation("sdpa")
        log_softmax = model(input_ids=ids).logits[:, -1].log_softmax(-1)
        prepare_model(model)
        token = torch.multinomial(log_softmax.exp(), 1)
        ids = torch.cat([ids, token], 1)
        logprobs.append(log_softmax.gather(1, token)[:, 0])
    return ids, torch.stack(logprobs, 1)
