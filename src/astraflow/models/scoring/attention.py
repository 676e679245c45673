"""Causal attention inside each sequence of a pack: block-diagonal, without a T x T mask, without padding elsewhere.

Registered with transformers under the name `IMPLEMENTATION`. No mask function is registered under it, so transformers
builds no mask; the layout of the pack reaches the attention function as the keyword `pack_layout` of the forward call.

CPU: neighbours of equal (or nearly equal) length share one batched causal call. Padding on the right is harmless
without a mask: a real token never attends to what comes after it. CUDA in half precision: one variable-length kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from astraflow.errors import ModelError

IMPLEMENTATION = "astraflow_packed"
MAX_PADDING = 0.03  # share of a bucket that may be padding; above it a call of its own is cheaper (measured)
SMALL_BUCKET_TOKENS = 256  # below this the call costs more than its arithmetic, padding or not


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that share one attention call: `count` x `length`, over `tokens` tokens of the pack."""

    tokens: int
    count: int
    length: int
    gather: torch.Tensor | None  # [count * length] int64 into the bucket's tokens; None: all equally long, a view
    scatter: torch.Tensor | None  # [tokens] int64 into [count * length]: the real tokens


@dataclass(frozen=True, slots=True)
class PackLayout:
    """What attention must know of a pack."""

    cu_lengths: torch.Tensor  # [S + 1] int32 on the model's device
    longest: int
    buckets: tuple[Bucket, ...]  # empty: the variable-length kernel is used


def pack_layout(cu_lengths: np.ndarray, device: torch.device, dtype: torch.dtype) -> PackLayout:
    """Layout of sequences that lie longest first. `cu_lengths`: [S + 1] int32; `dtype`: of the attention's inputs."""
    lengths = np.diff(cu_lengths)
    varlen = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    buckets = () if varlen else tuple(_buckets(lengths, device))
    return PackLayout(torch.from_numpy(cu_lengths).to(device), int(lengths.max()), buckets)


def _buckets(lengths: np.ndarray, device: torch.device) -> list[Bucket]:
    buckets = []
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        total = np.cumsum(lengths[start:])
        room = longest * np.arange(1, len(total) + 1)
        fits = (room - total <= MAX_PADDING * room) | (room <= SMALL_BUCKET_TOKENS)
        count = len(fits) if fits.all() else int(np.argmin(fits))
        buckets.append(_bucket(lengths[start : start + count], device))
        start += count
    return buckets


def _bucket(lengths: np.ndarray, device: torch.device) -> Bucket:
    count, longest, tokens = len(lengths), int(lengths[0]), int(lengths.sum())
    if lengths[-1] == longest:
        return Bucket(tokens, count, longest, None, None)
    starts = np.cumsum(lengths) - lengths
    column = np.arange(longest)
    real = column < lengths[:, None]
    # A pad repeats its sequence's last token: finite numbers that no real token ever sees.
    gather = starts[:, None] + np.minimum(column, lengths[:, None] - 1)
    indices = (torch.from_numpy(index).to(device) for index in (gather.ravel(), np.flatnonzero(real.ravel())))
    return Bucket(tokens, count, longest, *indices)


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
    """The transformers attention function. query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    if pack_layout is None or softcap is not None:
        raise ModelError(
            "attention", type(module).__name__, "cannot run packed (no layout, or it caps its scores)",
            "use a decoder with plain causal attention and call it through models.scoring",
        )  # fmt: skip
    window = sliding_window if sliding_window and sliding_window < pack_layout.longest else None
    if not pack_layout.buckets:
        return _varlen(query, key, value, pack_layout, scaling, window), None
    grouped = query.shape[1] != key.shape[1]
    sizes = [bucket.tokens for bucket in pack_layout.buckets]
    # One split (and one cat) for all buckets: slicing each would make backward add a full-size tensor per slice.
    parts = zip(*(torch.split(x[0].transpose(0, 1), sizes) for x in (query, key, value)), strict=True)
    outputs = [
        _bucket_attention(bucket, q, k, v, scaling, window, grouped)
        for bucket, (q, k, v) in zip(pack_layout.buckets, parts, strict=True)
    ]
    return torch.cat(outputs)[None], None


def _bucket_attention(
    bucket: Bucket,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    grouped: bool,
) -> torch.Tensor:
    """[tokens, H, D] in and out."""
    shape = (bucket.count, bucket.length)
    if bucket.gather is not None:
        query, key, value = (x.index_select(0, bucket.gather) for x in (query, key, value))
    query, key, value = (torch.unflatten(x, 0, shape).transpose(1, 2) for x in (query, key, value))
    mask = None
    if window is not None and window < bucket.length:
        position = torch.arange(bucket.length, device=query.device)
        age = position[:, None] - position
        mask = (age >= 0) & (age < window)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    output = output.transpose(1, 2).flatten(0, 1)
    return output if bucket.scatter is None else output.index_select(0, bucket.scatter)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    cu, longest = layout.cu_lengths, layout.longest
    output = varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=scaling, enable_gqa=q.shape[1] != k.shape[1],
        window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    assert isinstance(output, torch.Tensor)
    return output[None]


AttentionInterface.register(IMPLEMENTATION, packed_attention)
