"""Attention of one pass over tokens of many rows: no row is padded to another's length, however many tokens each reads.

Registered with transformers under the name `IMPLEMENTATION`. No mask function is registered under it, so transformers
builds no mask; what the pass reads reaches the attention function as the keyword `slot_layout` of the forward call, and
keys and values are those of all slots, as `SlotCache.update` returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from astraflow.errors import ModelError
from astraflow.models.linear import has_bfloat16

IMPLEMENTATION = "astraflow_slots"
_WASTE = 2  # rows are attended to together while at most so many places are there for each token


@dataclass(slots=True, eq=False)
class Block:
    """Rows of neighbouring slots that attend together, `length` places each."""

    slots: slice
    length: int
    width: int  # positions that they see
    at: np.ndarray  # [rows, length] position of each place; padding has that of the last token
    take: torch.Tensor | None  # [rows * length] token of each place; None: those of `tokens` in order
    tokens: slice | torch.Tensor  # of the pass, that this block answers
    places: torch.Tensor | None  # of these tokens; None: all in order
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by window

    def mask(self, window: int, like: torch.Tensor) -> torch.Tensor | None:
        """Added to scores, [rows, 1, length, width]; None: plain causal attention from position 0."""
        if window not in self.masks:
            self.masks[window] = self._mask(window, like)
        return self.masks[window]

    def _mask(self, window: int, like: torch.Tensor) -> torch.Tensor | None:
        if self.length == self.width > 1 and not self.at[:, 0].any() and not 0 < window < self.width:
            return None
        seen = np.arange(self.width)
        hidden = seen > self.at[:, :, None]
        if window:
            hidden |= seen <= self.at[:, :, None] - window
        flags = torch.from_numpy(hidden).to(like.device)
        # One token of each row and nothing hidden: a mask all the same, since attention of grouped heads without one is
        # slow on a CPU (bfloat16: 9 times).
        return torch.zeros(flags.shape, dtype=like.dtype, device=like.device).masked_fill_(flags, -torch.inf)[:, None]


@dataclass(slots=True, eq=False)
class SlotLayout:
    """What a pass reads: of slot `slots[i]` the tokens at positions `starts[i]` to `stops[i]`, one row after the other;
    slots ascend."""

    slots: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    device: torch.device
    windows: set[int] = field(default_factory=set)  # that layers had
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = self.stops - self.starts
        single = np.flatnonzero(counts == 1)
        if single.size:
            self.blocks.append(self._block(single, counts))
        group: list[int] = []
        for row in np.flatnonzero(counts > 1).tolist():
            if group and not self._fits(group, row, counts):
                self.blocks.append(self._block(np.array(group), counts))
                group = []
            group.append(row)
        if group:
            self.blocks.append(self._block(np.array(group), counts))

    def _fits(self, group: list[int], row: int, counts: np.ndarray) -> bool:
        """Whether `row` may attend with the rows of `group`."""
        together = [*group, row]
        longest, total = int(counts[together].max()), int(counts[together].sum())
        return bool(self.slots[row] == self.slots[group[-1]] + 1) and longest * len(together) <= _WASTE * total

    def _block(self, rows: np.ndarray, counts: np.ndarray) -> Block:
        offsets = np.cumsum(counts) - counts
        low, high, length = int(self.slots[rows[0]]), int(self.slots[rows[-1]]) + 1, int(counts[rows].max())
        at, take = np.zeros((high - low, length), np.int64), np.zeros((high - low, length), np.int64)
        steps = np.minimum(np.arange(length), counts[rows, None] - 1)
        place = self.slots[rows] - low
        at[place], take[place] = self.starts[rows, None] + steps, offsets[rows, None] + steps
        valid = np.zeros(take.shape, bool)
        valid[place] = np.arange(length) < counts[rows, None]
        width, tokens = int(self.stops[rows].max()), take[valid]
        if valid.all() and tokens[-1] - tokens[0] == tokens.size - 1:
            return Block(
                slice(low, high), length, width, at, None, slice(int(tokens[0]), int(tokens[-1]) + 1), None
            )  # fmt: skip
        flat, places = self._tensor(take.reshape(-1)), self._tensor(np.flatnonzero(valid))
        return Block(slice(low, high), length, width, at, flat, self._tensor(tokens), places)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    slot_layout: SlotLayout | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The transformers attention function. query [1, H, T, D], key, value [slots, K, positions, D] -> [1, T, H, D]."""
    if slot_layout is None or softcap is not None or s_aux is not None or position_bias is not None:
        raise ModelError(
            "attention", type(module).__name__, "is more than plain causal attention", "use another engine"
        )
    window = sliding_window or 0
    slot_layout.windows.add(window)
    queries = query[0].transpose(0, 1)
    output = torch.zeros(*queries.shape[:2], value.shape[-1], dtype=value.dtype, device=value.device)
    for block in slot_layout.blocks:
        rows = block.slots.stop - block.slots.start
        chosen = queries[block.tokens] if block.take is None else queries[block.take]
        k, v = key[block.slots, :, : block.width], value[block.slots, :, : block.width]
        mine = torch.unflatten(chosen, 0, (rows, block.length)).transpose(1, 2)
        found = _attend(mine, k, v, block.mask(window, query), scaling).transpose(1, 2).flatten(0, 1)
        output[block.tokens] = found if block.places is None else found[block.places]
    return output[None], None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """query [rows, H, length, D], key and value [rows, K, width, D] -> [rows, H, length, D]."""
    rows, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    if length == 1:  # heads that share keys are as good as tokens that do: nothing is repeated
        packed = query.reshape(rows, key.shape[1], groups, query.shape[-1])
        if _multiplies_fast(query):
            assert mask is not None  # none is needed only where a row has all of its tokens in the pass, more than one
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            scores = (packed @ key.contiguous().transpose(2, 3)).float().mul_(scale).add_(mask)
            found = scores.softmax(-1).to(value.dtype) @ value
        else:
            found = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
        return found.reshape(rows, heads, 1, value.shape[-1])
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def _multiplies_fast(query: torch.Tensor) -> bool:
    """Two products of whole batches are faster than torch's attention, which on a CPU goes row by row, head by head."""
    return query.device.type == "cpu" and (
        query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and has_bfloat16())
    )


AttentionInterface.register(IMPLEMENTATION, slot_attention)
