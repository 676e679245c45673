"""Causal attention inside each sequence of a pack: block-diagonal, without a T x T mask, without padding elsewhere.

Registered with transformers under the name `IMPLEMENTATION`. No mask function is registered under it, so transformers
builds no mask; the layout of the pack reaches the attention function as the keyword `pack_layout` of the forward call.

| device | a pack whose sequences share their starts | any other |
|---|---|---|
| CPU | the tree in parts (trees/attention.py) where that is worth it | buckets of nearly equal length |
| CUDA | FlexAttention with the tree's mask (trees/flex.py) | a variable-length kernel in half precision, else buckets |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from astraflow.errors import ModelError
from astraflow.models.scoring.layout import Bucket, PackLayout, Taken, TreeLayout
from astraflow.models.scoring.team import HeadExchange
from astraflow.models.scoring.trees.attention import Kernel, TreeAttention
from astraflow.models.scoring.trees.flex import TreeMask, tree_flex

IMPLEMENTATION = "astraflow_packed"

# What models pass along to every kind of attention and mean nothing to this one.
_WITHOUT_EFFECT = {
    "cache_position", "output_attentions", "output_hidden_states", "position_embeddings", "position_ids", "return_dict",
    "use_cache",
}  # fmt: skip
_WITHOUT_EFFECT_AT = {"dropout": 0.0, "is_causal": True}


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
    exchange: HeadExchange | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The transformers attention function. query [1, H, U, D], key and value [1, K, U, D] -> [1, U, H, D].

    Raises: ModelError: the model asks for something else than plain causal attention, or there is no layout.
    """
    if softcap is not None:
        others["softcap"] = softcap
    if pack_layout is None or (asked := _with_effect(others)):
        why = "no pack_layout" if pack_layout is None else f"it asks for {', '.join(asked)}"
        raise ModelError(
            "attention", type(module).__name__, f"cannot run packed ({why})",
            "use a decoder with plain causal attention and call it through models.scoring",
        )  # fmt: skip
    window = sliding_window if sliding_window and sliding_window < pack_layout.longest else None
    if exchange is not None:
        query, key, value = exchange.to_heads(query, key, value)
    if isinstance(pack_layout.tree, TreeMask):
        output = tree_flex(query, key, value, pack_layout.tree.within(window), scaling)[0].transpose(0, 1)
    else:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        output = _rows_attention(query, key, value, pack_layout, scaling, window)
    output = output[None]
    return output if exchange is None else exchange.to_tokens(output), None


def _with_effect(others: Mapping[str, object]) -> list[str]:
    """Names of the keywords that would change what comes out, as attention sinks, biases and masks of heads do."""
    return sorted(
        name
        for name, value in others.items()
        if value is not None
        and name not in _WITHOUT_EFFECT
        and not (name in _WITHOUT_EFFECT_AT and value == _WITHOUT_EFFECT_AT[name])
    )


def _rows_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pack_layout: PackLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[U, H, D] in and out."""
    if isinstance(pack_layout.tree, TreeLayout):
        query, key, value = _of_autocast(query, key, value)
        tree: torch.Tensor = TreeAttention.apply(query, key, value, pack_layout.tree, Kernel(scaling, window))  # type: ignore[no-untyped-call]
        return tree
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
    return output


def _of_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In the dtype of the arithmetic, as torch's own attention makes them."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    return [x.to(dtype) for x in tensors]


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
