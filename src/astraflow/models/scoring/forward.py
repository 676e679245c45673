"""Logprobs of the trained tokens of a pack, for any Hugging Face causal decoder.

One flattened [1, T] forward pass without padding; the vocabulary projection runs only at positions whose next token
is trained, in chunks that are computed again in the backward pass, so that [N, V] logits never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.linear import ROWS, prefers_onednn, product, weight_gradient
from astraflow.models.scoring.attention import IMPLEMENTATION
from astraflow.models.scoring.layout import pack_layout
from astraflow.models.scoring.lean.layers import make_lean
from astraflow.models.scoring.packing import Pack
from astraflow.models.scoring.team import ALONE, Team

CHUNK_ELEMENTS = 1 << 24  # logits of one chunk: 64 MB in float32
_FEW_ELEMENTS = 1 << 21  # of what is computed from them by element
_WIDTH = 4096  # words whose gradient is one product: what is added up stays in the cache
_ON_GPU = 8  # times as many of each, as small products leave a GPU idle

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
        columns = HeadLogprobs.apply(picked, head.weight, head.bias, targets, temperature)  # type: ignore[no-untyped-call]
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
    """The N trained tokens of `pack`, all [N] float32; under `weights` (by Hugging Face name) when given."""
    policy = PackedPolicy(model)
    named = {f"model.{name}": tensor for name, tensor in (weights or {}).items()}
    result: Scores = (
        torch.func.functional_call(policy, named, (pack, temperature)) if named else policy(pack, temperature)
    )
    return result


class HeadLogprobs(torch.autograd.Function):
    """Vocabulary projection, log-softmax and pick in one, a chunk of rows after the other. Keeps hidden states only:
    logits are computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs, entropies, norms = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        matrix = weight.to(hidden.dtype)
        for rows in _chunks(hidden, weight, CHUNK_ELEMENTS):
            logits = _logits(hidden[rows], matrix, bias, temperature)
            norm = norms[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - norm
            for few in _chunks(logits, weight, _FEW_ELEMENTS):
                part = (logits[few] - norm[few, None]).exp_().mul_(logits[few])
                entropies[rows][few] = norm[few] - part.sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies, norms

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """See `_slope` for the gradient of the logits. That of the matrix, as large as itself, is there once."""
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        pulls = [None if g is None else g[:, None] / ctx.temperature for g in gradients]
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if bias is not None else None
        matrix = weight.to(hidden.dtype)
        width = _WIDTH * _ON_GPU if hidden.is_cuda else _WIDTH
        for rows in _chunks(hidden, weight, CHUNK_ELEMENTS):
            slope = _logits(hidden[rows], matrix, bias, ctx.temperature)
            for few in _chunks(slope, weight, _FEW_ELEMENTS):
                pull = [None if column is None else column[rows][few] for column in pulls]
                _slope(slope[few], targets[rows][few], norms[rows][few], entropies[rows][few], pull)
            slope = slope.to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[rows] = product(slope, matrix.T)
            if to_weight is not None:
                for start in range(0, len(weight), width):
                    words = slice(start, start + width)
                    to_weight[words] += weight_gradient(slope[:, words], hidden[rows])
            if to_bias is not None:
                to_bias += slope.sum(0)
        return to_hidden, to_weight, to_bias, None, None


def _slope(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norms: torch.Tensor,
    entropies: torch.Tensor,
    pulls: Sequence[torch.Tensor | None],
) -> None:
    """Logits z [n, V] become their own gradient, in place. With p = softmax(z), entropy H and norm Z:
    d log p_t / dz = 1_t - p, dH / dz = -p (log p + H) and d log Z / dz = p.

    Args: pulls: gradients of the logprobs, entropies and norms, each [n, 1] or None.
    """
    of_logprobs, of_entropies, of_norms = pulls
    slope = logits.sub_(norms[:, None])
    pull = None if of_entropies is None else (slope + entropies[:, None]).mul_(-of_entropies)
    for of_rows in (None if of_logprobs is None else -of_logprobs, of_norms):
        if of_rows is not None:
            pull = of_rows if pull is None else pull.add_(of_rows)
    assert pull is not None
    slope.exp_().mul_(pull)
    if of_logprobs is not None:
        slope.scatter_add_(1, targets[:, None], of_logprobs)


def _chunks(rows: torch.Tensor, weight: torch.Tensor, elements: int) -> Iterator[slice]:
    """Of the N `rows`: chunks of about the same size, of at most so many logits, as `product` likes them."""
    count = len(rows)
    most = max(1, elements * (_ON_GPU if rows.is_cuda else 1) // len(weight))
    most -= most % ROWS if most > ROWS else 0
    size = -(-count // max(1, -(-count // most)))
    size = max(1, min(most, size + -size % ROWS))
    for start in range(0, count, size):
        yield slice(start, start + size)


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
        logits = product(hidden, weight).float()
        if bias is not None:
            logits += bias
    return logits if temperature == 1.0 else logits.div_(temperature)
