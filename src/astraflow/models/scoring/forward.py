"""Logprobs of the trained tokens of a pack, for any Hugging Face causal decoder.

One flattened [1, T] forward pass without padding; the vocabulary projection runs only at positions whose next token
is trained, in chunks that are computed again in the backward pass, so that [N, V] logits never exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.linear import ROWS, prefers_onednn, product, weight_gradient
from astraflow.models.scoring.attention import IMPLEMENTATION
from astraflow.models.scoring.layout import pack_layout
from astraflow.models.scoring.lean import make_lean
from astraflow.models.scoring.packing import Pack
from astraflow.models.scoring.team import ALONE, Team

CHUNK_ELEMENTS = 1 << 25  # logits of one chunk: 128 MB in float32

# Settings that change logits after the projection; a model that has one would be scored wrongly.
UNSUPPORTED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Scores(NamedTuple):
    """What the distributions `log_softmax(logits / T)` of the N trained tokens of a pack are like, each [N] float32."""

    logprobs: torch.Tensor  # of the tokens
    entropies: torch.Tensor
    log_norms: torch.Tensor  # log of the sum of exp(logits / T)


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Switch `model` to packed attention, dropout off, and to layers that keep less for a backward pass.

    Raises: ModelError: its logits are scaled or capped after the projection.
    """
    config = model.config.to_dict()
    for name in UNSUPPORTED_HEADS:
        if config.get(name) not in (None, 1, 1.0):
            raise ModelError(f"model.config.{name}", config[name], "is not supported in training", "use another model")
    model.set_attn_implementation(IMPLEMENTATION)
    make_lean(model)
    model.eval()  # type: ignore[no-untyped-call]
    return model


class PackedPolicy(nn.Module):
    """A decoder as a function of a pack, so that `functional_call` can run it under other weights."""

    def __init__(self, model: PreTrainedModel, team: Team = ALONE) -> None:
        super().__init__()
        self.model, self.team = model, team

    def itself(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one sequence [T] by the model's own forward pass, with the attention that it has now."""
        logits: torch.Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits

    def forward(self, pack: Pack, temperature: float) -> Scores:
        """The trained tokens of `pack` at temperature T."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        picked = target_states(cast(PreTrainedModel, self.model.base_model), pack, self.team)
        targets = torch.from_numpy(self.team.share(pack.target_ids)).to(picked.device)
        parts = []
        size = max(1, CHUNK_ELEMENTS // head.weight.shape[0])
        for part, wanted in zip(torch.split(picked, size), torch.split(targets, size), strict=True):
            parts.append(
                HeadLogprobs.apply(part, head.weight, head.bias, wanted, temperature)  # type: ignore[no-untyped-call]
            )
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        return Scores(*(self.team.together(column, pack.num_targets) for column in columns))


def target_states(decoder: PreTrainedModel, pack: Pack, team: Team = ALONE) -> torch.Tensor:
    """Last hidden states [N, H] of the tokens before the trained ones, in the dtype of the arithmetic; of a `team` the
    share of this member."""
    device = decoder.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else decoder.dtype
    token_ids, position_ids, cu_lengths, places = _filled(pack, team.size)
    hidden: torch.Tensor = decoder(
        input_ids=torch.from_numpy(team.tokens(token_ids)).to(device)[None],
        position_ids=torch.from_numpy(team.positions(position_ids)).to(device)[None],
        use_cache=False,
        pack_layout=pack_layout(cu_lengths, places, device, dtype),
        exchange=team.exchange,
    ).last_hidden_state[0]
    return team.picked(hidden, pack.target_index).to(dtype)


def packed_logprobs(
    model: PreTrainedModel, pack: Pack, temperature: float, weights: Mapping[str, torch.Tensor] | None = None
) -> Scores:
    """The trained tokens of `pack`; under `weights` (by Hugging Face name) when given."""
    policy = PackedPolicy(model)
    named = {f"model.{name}": tensor for name, tensor in (weights or {}).items()}
    result: Scores = (
        torch.func.functional_call(policy, named, (pack, temperature)) if named else policy(pack, temperature)
    )
    return result


class HeadLogprobs(torch.autograd.Function):
    """Vocabulary projection, log-softmax and pick in one; keeps hidden states only, logits are computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = _logits(hidden, weight, bias, temperature)
        norm = logits.logsumexp(-1)
        logprobs = logits.gather(1, targets[:, None])[:, 0] - norm
        probabilities = (logits - norm[:, None]).exp_()
        entropies = norm - (probabilities.mul_(logits)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, norm, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies, norm

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """With logits z, p = softmax(z), entropy H and norm Z: d log p_t / dz = 1_t - p, dH / dz = -p (log p + H) and
        d log Z / dz = p."""
        hidden, weight, bias, targets, norm, entropies = ctx.saved_tensors
        of_logprobs, of_entropies, of_norms = (None if g is None else g[:, None] / ctx.temperature for g in gradients)
        slope = _logits(hidden, weight, bias, ctx.temperature).sub_(norm[:, None])
        pull = None if of_entropies is None else (slope + entropies[:, None]).mul_(-of_entropies)
        for of_rows in (None if of_logprobs is None else -of_logprobs, of_norms):
            if of_rows is not None:
                pull = of_rows if pull is None else pull.add_(of_rows)
        assert pull is not None
        slope = slope.exp_().mul_(pull)
        if of_logprobs is not None:
            slope.scatter_add_(1, targets[:, None], of_logprobs)
        slope = slope.to(hidden.dtype)
        return (
            product(slope, weight.to(hidden.dtype).T) if ctx.needs_input_grad[0] else None,
            weight_gradient(slope, hidden).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            slope.sum(0).to(weight.dtype) if bias is not None else None,
            None,
            None,
        )


def _filled(pack: Pack, members: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """token_ids, position_ids, cu_lengths, places; with sequences of one token (id 0) at the end, so that all members
    have as many, and where the CPU's kernels are compiled for a number of rows that number. Nothing reads what comes
    out of them, so they have no gradient."""
    extra = -pack.num_computed % (members * (ROWS if prefers_onednn() else 1))
    more = np.arange(extra)
    cu_lengths = np.concatenate((pack.cu_lengths, (pack.cu_lengths[-1] + 1 + more).astype(pack.cu_lengths.dtype)))
    places = None if pack.places is None else np.concatenate((pack.places, pack.num_computed + more))
    return np.pad(pack.token_ids, (0, extra)), np.pad(pack.position_ids, (0, extra)), cu_lengths, places


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """[N, V] float32, divided by the temperature."""
    with torch.autocast(hidden.device.type, enabled=False):  # the caller chose the dtype; backward must find the same
        logits = product(hidden, weight.to(hidden.dtype)).float()
        if bias is not None:
            logits += bias
    return logits if temperature == 1.0 else logits / temperature
