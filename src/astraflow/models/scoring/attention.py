"""Causal attention inside each sequence of a pack: block-diagonal, without a T x T mask, without padding elsewhere.

Registered with transformers under the name `IMPLEMENTATION`. No mask function is registered under it, so transformers
builds no mask; the layout of the pack reaches the attention function as the keyword `pack_layout` of the forward call.

CPU: neighbours of equal (or nearly equal) length share one batched causal call. Padding on the right is harmless
without a mask: a real token never attends to what comes after it. CUDA in half precision: one variable-length kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from astraflow.errors import ModelError
from astraflow.models.scoring.offsets import offsets, ramps

IMPLEMENTATION = "astraflow_packed"
MAX_PADDING = 0.03  # share of a bucket that may be padding; above it a call of its own is cheaper (measured)
SMALL_BUCKET_TOKENS = 256  # below this the call costs more than its arithmetic, padding or not


class Taken(torch.autograd.Function):
    """Rows of a tensor by number, some of them more than once: like `index_select`, but its gradient is one sum over
    runs of rows, where that of `index_select` adds row by row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, wanted: Rows) -> torch.Tensor:
        ctx.wanted = wanted
        return rows.index_select(0, wanted.index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        upstream = gradients[0].reshape(len(gradients[0]), -1)
        summed = embedding_bag(ctx.wanted.order, upstream, ctx.wanted.runs, mode="sum")
        return summed.view(-1, *gradients[0].shape[1:]), None


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows `Taken` takes."""

    index: torch.Tensor  # [P] int64: row p of the result is this row of the argument
    order: torch.Tensor  # [P] int64: the places of row 0 in the result, those of row 1, ...
    runs: torch.Tensor  # [number of rows of the argument] int64: where those of each row start in `order`

    @classmethod
    def of(cls, index: np.ndarray, count: int, device: torch.device) -> Rows:
        """`index`: [P] int64 into `count` rows."""
        order = np.argsort(index, kind="stable")
        runs = offsets(np.bincount(index, minlength=count))[:-1]
        return cls(*(torch.from_numpy(array).to(device) for array in (index, order, runs)))


class Bucket(NamedTuple):
    """Sequences that share one attention call."""

    sequences: int
    length: int  # of the longest; the others are padded


@dataclass(frozen=True, slots=True)
class PackLayout:
    """What attention must know of a pack of U tokens whose sequences have T positions."""

    cu_lengths: torch.Tensor  # [S + 1] int32 on the model's device
    longest: int
    buckets: tuple[Bucket, ...]  # empty: the variable-length kernel is used
    spread: Rows | None  # from the U tokens to the places of the buckets (or to T positions); None: they are the same
    collect: Rows | None  # from there to the U tokens


def pack_layout(
    cu_lengths: np.ndarray, places: np.ndarray | None, device: torch.device, dtype: torch.dtype
) -> PackLayout:
    """Layout of sequences that lie longest first.

    Args: cu_lengths: [S + 1] int32. places: [T] int64, as of a Pack. dtype: of the attention's inputs.
    """
    lengths = np.diff(cu_lengths)
    varlen = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    buckets = [] if varlen else _buckets(lengths)
    spread = collect = None
    padding = sum(bucket.sequences * bucket.length for bucket in buckets) - int(cu_lengths[-1])
    if places is not None or (buckets and padding):
        positions = np.arange(cu_lengths[-1]) if varlen else _padded(lengths, buckets)
        index = positions if places is None else places[positions]
        count = int(cu_lengths[-1]) if places is None else int(places.max()) + 1
        spread = Rows.of(index, count, device)
        # The first place of a token: a pad repeats the last token of its sequence and comes after it.
        collect = Rows.of(spread.order[spread.runs].cpu().numpy(), len(index), device)
    return PackLayout(
        torch.from_numpy(cu_lengths).to(device), int(lengths.max()), tuple(buckets), spread, collect
    )  # fmt: skip


def _buckets(lengths: np.ndarray) -> list[Bucket]:
    buckets = []
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        total = np.cumsum(lengths[start:])
        room = longest * np.arange(1, len(total) + 1)
        fits = (room - total <= MAX_PADDING * room) | (room <= SMALL_BUCKET_TOKENS)
        count = len(fits) if fits.all() else int(np.argmin(fits))
        buckets.append(Bucket(count, longest))
        start += count
    return buckets


def _padded(lengths: np.ndarray, buckets: list[Bucket]) -> np.ndarray:
    """Positions [P] of the sequences, each as long as its bucket: a pad repeats its sequence's last token, finite
    numbers that no real token ever sees."""
    width = np.repeat([bucket.length for bucket in buckets], [bucket.sequences for bucket in buckets])
    column = np.minimum(ramps(width), np.repeat(lengths - 1, width))
    positions: np.ndarray = np.repeat(offsets(lengths)[:-1], width) + column
    return positions


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pack_layout: PackLayout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The transformers attention function. query [1, H, U, D], key and value [1, K, U, D] -> [1, U, H, D]."""
    if pack_layout is None or softcap is not None:
        raise ModelError(
            "attention", type(module).__name__, "cannot run packed (no layout, or it caps its scores)",
            "use a decoder with plain causal attention and call it through models.scoring",
        )  # fmt: skip
    window = sliding_window if sliding_window and sliding_window < pack_layout.longest else None
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if pack_layout.spread is not None:
        query, key, value = (Taken.apply(x, pack_layout.spread) for x in (query, key, value))  # type: ignore[no-untyped-call]
    if pack_layout.buckets:
        sizes = [bucket.sequences * bucket.length for bucket in pack_layout.buckets]
        # One split (and one cat) for all buckets: slicing each would make backward add a full-size tensor per slice.
        parts = zip(*(torch.split(x, sizes) for x in (query, key, value)), strict=True)
        output = torch.cat([
            _bucket_attention(bucket, q, k, v, scaling, window)
            for bucket, (q, k, v) in zip(pack_layout.buckets, parts, strict=True)
        ])  # fmt: skip
    else:
        output = _varlen(query, key, value, pack_layout, scaling, window)
    if pack_layout.collect is not None:
        output = Taken.apply(output, pack_layout.collect)  # type: ignore[no-untyped-call]
    return output[None], None


def _bucket_attention(
    bucket: Bucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[sequences * length, H, D] in and out."""
    grouped = query.shape[1] != key.shape[1]
    query, key, value = (torch.unflatten(x, 0, tuple(bucket)).transpose(1, 2) for x in (query, key, value))
    mask = None
    if window is not None and window < bucket.length:
        position = torch.arange(bucket.length, device=query.device)
        age = position[:, None] - position
        mask = (age >= 0) & (age < window)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).flatten(0, 1)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[T, H, D] in and out."""
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

    q, k, v = (x.contiguous() for x in (query, key, value))
    cu, longest = layout.cu_lengths, layout.longest
    output = varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=scaling, enable_gqa=q.shape[1] != k.shape[1],
        window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)
    return output


AttentionInterface.register(IMPLEMENTATION, packed_attention)
