"""Attention of a tree of tokens on a GPU: FlexAttention with a block mask that comes from the tree.

Depth first, place k is a key of place q when k <= q and q lies before the end of k's subtree. Blocks are found from the
ends alone, without a U x U mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:  # its import takes half a second, which only a GPU needs
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


class TreeMask:
    """The mask of a pack, for each window that the model's layers have."""

    def __init__(self, ends: np.ndarray, depths: np.ndarray, device: torch.device) -> None:
        """Args: ends, depths: [U] int64, one past the subtree and the position of each place."""
        self._numbers = ends
        self._ends, self._depths = (torch.from_numpy(x).to(device, torch.int32) for x in (ends, depths))
        self._masks: dict[int | None, BlockMask] = {}

    def within(self, window: int | None) -> BlockMask:
        """Of layers that see so many tokens; None: all before it."""
        if window not in self._masks:
            self._masks[window] = self._make(window)
        return self._masks[window]

    def _make(self, window: int | None) -> BlockMask:
        from torch.nn.attention.flex_attention import BlockMask

        ends, depths = self._ends, self._depths

        def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            inside = (key <= query) & (query < ends[key])
            return inside if window is None else inside & (depths[query] - depths[key] < window)

        some, whole = blocks(self._numbers)
        if window is not None:
            some, whole = some | whole, np.zeros_like(whole)
        device, size = ends.device, len(self._numbers)
        return BlockMask.from_kv_blocks(
            *_listed(some, device), *_listed(whole, device), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(size, size)
        )  # fmt: skip


def blocks(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of blocks of queries and blocks of keys [n, n] bool: some of the keys are seen; all of them by all queries."""
    size = len(ends)
    starts = np.arange(0, size, BLOCK)
    lasts = np.minimum(starts + BLOCK, size) - 1
    furthest, nearest = (reduce.reduceat(ends, starts) for reduce in (np.maximum, np.minimum))
    before = np.arange(len(starts))[:, None] > np.arange(len(starts))
    some = (before & (furthest > starts[:, None])) | np.eye(len(starts), dtype=bool)
    whole = before & (nearest > lasts[:, None])
    return some & ~whole, whole


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of chosen blocks of each row, and their numbers first in it: [1, 1, n] and [1, 1, n, n] int32."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    count = chosen.sum(1).astype(np.int32)
    return torch.from_numpy(count)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


def tree_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scaling: float | None
) -> torch.Tensor:
    """query [1, H, U, D], key and value [1, K, U, D] -> [1, H, U, D]."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Any = _compiled() if query.device.type == "cuda" else flex_attention
    output: torch.Tensor = attend(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
