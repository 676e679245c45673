"""How the sequences of a pack lie for attention: in buckets of nearly equal length, in a tree, or end to end.

Neighbours of equal (or nearly equal) length share one batched causal call. Padding on the right is harmless without a
mask: a real token never attends to what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from astraflow.models.scoring.offsets import offsets, ramps
from astraflow.models.scoring.trees.flex import TreeMask
from astraflow.models.scoring.trees.tokens import Stretch, TokenTree, depths, stretches, subtree_ends, token_tree

MAX_PADDING = 0.03  # share of a bucket that may be padding; above it a call of its own is cheaper (measured)
SMALL_BUCKET_TOKENS = 256  # below this the call costs more than its arithmetic, padding or not


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

    def summed(self, taken: torch.Tensor) -> torch.Tensor:
        """The sum of each row's places in `taken` [P, ...]: the gradient of taking them."""
        total = embedding_bag(self.order, taken.reshape(len(taken), -1), self.runs, mode="sum")
        return total.view(-1, *taken.shape[1:])


class Taken(torch.autograd.Function):
    """Rows of a tensor by number, some of them more than once: like `index_select`, but its gradient is one sum over
    runs of rows, where that of `index_select` adds row by row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, wanted: Rows) -> torch.Tensor:
        ctx.wanted = wanted
        return rows.index_select(0, wanted.index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.wanted.summed(gradients[0]), None


class Bucket(NamedTuple):
    """Sequences that share one attention call."""

    sequences: int
    length: int  # of the longest; the others are padded


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A pack as a tree: what each sequence has for itself lies in buckets, the rest is read as stretches."""

    buckets: tuple[Bucket, ...]
    spread: Rows  # from the U computed tokens to the places of the buckets
    own: torch.Tensor  # [U] int64: the place of each computed token in its own sequence
    stretches: tuple[Stretch, ...]
    depths: torch.Tensor  # [U] int64 position in the sequence


@dataclass(frozen=True, slots=True)
class PackLayout:
    """What attention must know of a pack of U tokens whose sequences have T positions."""

    cu_lengths: torch.Tensor  # [S + 1] int32 on the model's device
    longest: int
    buckets: tuple[Bucket, ...]  # empty: the variable-length kernel is used
    spread: Rows | None  # from the U tokens to the places of the buckets (or to T positions); None: they are the same
    collect: Rows | None  # from there to the U tokens
    tree: TreeLayout | TreeMask | None = None  # used instead of all that


def pack_layout(
    cu_lengths: np.ndarray, places: np.ndarray | None, device: torch.device, dtype: torch.dtype
) -> PackLayout:
    """Layout of sequences that lie longest first.

    Args: cu_lengths: [S + 1] int32. places: [T] int64, as of a Pack. dtype: of the attention's inputs.
    """
    lengths = np.diff(cu_lengths)
    tree = None if places is None else _tree(cu_lengths, places, device)
    varlen = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    found = [] if varlen or tree is not None else buckets(lengths)
    spread = collect = None
    padding = sum(bucket.sequences * bucket.length for bucket in found) - int(cu_lengths[-1])
    if tree is None and (places is not None or (found and padding)):
        positions = np.arange(cu_lengths[-1]) if varlen else padded(lengths, found)
        index = positions if places is None else places[positions]
        count = int(cu_lengths[-1]) if places is None else int(places.max()) + 1
        spread = Rows.of(index, count, device)
        # The first place of a token: a pad repeats the last token of its sequence and comes after it.
        collect = Rows.of(spread.order[spread.runs].cpu().numpy(), len(index), device)
    return PackLayout(
        torch.from_numpy(cu_lengths).to(device), int(lengths.max()), tuple(found), spread, collect, tree
    )  # fmt: skip


def _tree(cu_lengths: np.ndarray, places: np.ndarray, device: torch.device) -> TreeLayout | TreeMask | None:
    """None: nothing that is shared is worth a stretch."""
    tree = token_tree(cu_lengths, places)
    if device.type == "cuda":
        return TreeMask(subtree_ends(tree, places), depths(tree), device)
    from_here, read = stretches(tree, places)
    return _tree_layout(tree, places, from_here, read, device) if read else None


def _tree_layout(
    tree: TokenTree, places: np.ndarray, from_here: np.ndarray, read: list[Stretch], device: torch.device
) -> TreeLayout:
    own = tree.lengths - tree.shared
    lengths = tree.lengths - from_here
    order = np.argsort(-lengths, kind="stable")
    order = order[own[order] > 0]  # the same sequence twice: the first one has the tokens
    found = buckets(lengths[order])
    position = padded(lengths[order], found)  # in the sequences from there on, end to end
    ends = offsets(lengths[order])
    sequence = np.searchsorted(ends, position, "right") - 1
    index = places[tree.first[order][sequence] + from_here[order][sequence] + position - ends[sequence]]
    width = np.repeat([bucket.length for bucket in found], [bucket.sequences for bucket in found])
    begin = np.empty(len(own), dtype=np.int64)  # of each sequence's own tokens among the places of the buckets
    begin[order] = offsets(width)[:-1] + (tree.shared - from_here)[order]
    at = np.repeat(begin, own) + ramps(own)
    spread = Rows.of(index, int(tree.begin[-1]), device)
    return TreeLayout(
        tuple(found), spread, torch.from_numpy(at).to(device), tuple(read), torch.from_numpy(depths(tree)).to(device)
    )  # fmt: skip


def buckets(lengths: np.ndarray) -> list[Bucket]:
    """Of falling lengths [S]."""
    found = []
    start = 0
    while start < len(lengths):
        longest = int(lengths[start])
        total = np.cumsum(lengths[start:])
        room = longest * np.arange(1, len(total) + 1)
        fits = (room - total <= MAX_PADDING * room) | (room <= SMALL_BUCKET_TOKENS)
        count = len(fits) if fits.all() else int(np.argmin(fits))
        found.append(Bucket(count, longest))
        start += count
    return found


def padded(lengths: np.ndarray, found: list[Bucket]) -> np.ndarray:
    """Positions [P] of the sequences, each as long as its bucket: a pad repeats its sequence's last token, finite
    numbers that no real token ever sees."""
    width = np.repeat([bucket.length for bucket in found], [bucket.sequences for bucket in found])
    column = np.minimum(ramps(width), np.repeat(lengths - 1, width))
    positions: np.ndarray = np.repeat(offsets(lengths)[:-1], width) + column
    return positions
