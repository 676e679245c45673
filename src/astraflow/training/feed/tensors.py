"""Rows of a batch as torch tensors that any causal language model takes: padded, or packed without padding.

Everything is aligned to tokens: `loss_mask[b, t]` says that token t was sampled and is trained, and its logprob comes
from the logits at t - 1. So, in both layouts:

    logits = model(**micro.inputs()).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None])[..., 0]   # of micro.loss_mask[:, 1:]

A fork of an episode comes with its shared prefix in front, untrained. Tokens behind the last trained one are left out,
rows without a trained token too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from astraflow.models.scoring.offsets import offsets, ramps
from astraflow.models.scoring.packing import TokenRows, first_fit, rows_from_table
from astraflow.wire.codec import TRAINING_SCHEMA, flat_values

Layout = Literal["packed", "padded"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What fits one forward and backward pass. Padded: B rows of L tokens, padding at the end. Packed: B is 1, the S
    sequences lie end to end."""

    input_ids: torch.Tensor  # [B, L] int64; 0 where padded
    position_ids: torch.Tensor  # [B, L] int64, from 0 in each sequence
    attention_mask: torch.Tensor  # [B, L] bool: False where padded
    loss_mask: torch.Tensor  # [B, L] bool: sampled, and to be trained
    behavior_logprobs: torch.Tensor  # [B, L] float32, to be read where loss_mask is True
    advantages: torch.Tensor  # [B, L] float32, the same
    weights: torch.Tensor  # [B, L] float32 loss weight of the token's sequence
    versions: torch.Tensor  # [B, L] int32 weight version that sampled the token; -1 where none did
    lengths: torch.Tensor  # [S] int64 tokens of each sequence
    rows: torch.Tensor  # [S] int64 row of the table that each sequence is
    packed: bool
    token_columns: dict[str, torch.Tensor] = field(default_factory=dict)  # of stages: [B, L] float32, NaN: not given
    row_columns: dict[str, torch.Tensor] = field(default_factory=dict)  # of stages: [S] float32, NaN: not given

    def inputs(self) -> dict[str, Any]:
        """Arguments of a Hugging Face model. It tells packed sequences apart by their positions, but only without a
        cache and without an attention mask."""
        found = {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}
        return found if self.packed else {**found, "attention_mask": self.attention_mask}

    @property
    def cu_lengths(self) -> torch.Tensor:
        """[S + 1] int32 offsets of packed sequences, as kernels for variable lengths want them."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    def to(self, device: torch.device | str) -> Microbatch:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name in self.__dataclass_fields__
            if isinstance(value := self.__getattribute__(name), torch.Tensor)
        }
        for name, columns in (("token_columns", self.token_columns), ("row_columns", self.row_columns)):
            moved[name] = {key: value.to(device, non_blocking=True) for key, value in columns.items()}
        return replace(self, **moved)


def microbatches(table: pa.Table, tokens_per_microbatch: int, layout: Layout = "packed") -> list[Microbatch]:
    """The rows of a batch, cut so that each microbatch has at most `tokens_per_microbatch` places (padding counts), or
    is one longer sequence.

    Raises: TrainingError: a fork whose parent is not in the batch.
    """
    rows = rows_from_table(table)
    row_of = np.repeat(np.arange(len(rows.weights)), np.diff(rows.starts))
    trained = np.flatnonzero(rows.trained & (rows.weights > 0)[row_of])
    if not len(trained):
        return []
    counts = np.bincount(row_of[trained], minlength=len(rows.weights))
    kept = np.flatnonzero(counts)
    lengths = trained[np.cumsum(counts[kept]) - 1] + 1 - rows.starts[kept]
    if layout == "packed":
        order, bounds = first_fit(lengths, tokens_per_microbatch)
    else:
        order = np.argsort(-lengths, kind="stable")
        bounds = _rectangles(lengths[order], tokens_per_microbatch)
    flat = _flat_columns(table, rows)
    return [
        _one(rows, flat, kept[order[a:b]], lengths[order[a:b]], layout == "packed") for a, b in pairwise(bounds)
    ]  # fmt: skip


def _rectangles(lengths: np.ndarray, capacity: int) -> list[int]:
    """Where to cut falling lengths, so that count times longest stays within `capacity`."""
    bounds, start = [0], 0
    for place, longest in enumerate(lengths.tolist()):
        first = int(lengths[start])
        if place > start and first * (place - start + 1) > capacity:
            bounds.append(place)
            start, first = place, longest
    return [*bounds, len(lengths)]


class _Added:
    """The columns that stages added: values per token of the table, or per row."""

    def __init__(self) -> None:
        self.per_token: dict[str, np.ndarray] = {}
        self.per_row: dict[str, np.ndarray] = {}


def _flat_columns(table: pa.Table, rows: TokenRows) -> _Added:
    added = _Added()
    for field_ in table.schema:
        if field_.name in TRAINING_SCHEMA.names:
            continue
        column = table.column(field_.name)
        if pa.types.is_floating(field_.type):
            added.per_row[field_.name] = column.to_numpy().astype(np.float32)
        elif pa.types.is_list(field_.type) and pa.types.is_floating(field_.type.value_type):
            added.per_token[field_.name] = _per_token(table, column, rows)
    return added


def _per_token(table: pa.Table, column: pa.ChunkedArray, rows: TokenRows) -> np.ndarray:
    """[T] of the (expanded) rows; NaN in rows that lack the column."""
    own = np.diff(offsets(np.array(pa.compute.list_value_length(table.column("token_ids")).to_numpy(), np.int64)))
    given = np.repeat(~np.array(column.is_null().to_numpy(), bool), own)
    values = np.full(len(given), np.nan, np.float32)
    values[given] = flat_values(column.drop_null())
    return values if rows.places is None else values[rows.places]


def _one(rows: TokenRows, added: _Added, kept: np.ndarray, lengths: np.ndarray, packed: bool) -> Microbatch:
    """Lay out the sequences `kept` ([S] rows) with their first `lengths` tokens each."""
    where = np.repeat(rows.starts[kept], lengths) + ramps(lengths)
    shape = (1, len(where)) if packed else (len(kept), int(lengths[0]))  # padded: the first is the longest
    filled = np.ones(shape, bool) if packed else np.arange(shape[1]) < lengths[:, None]

    def spread(values: np.ndarray, fill: float = 0) -> torch.Tensor:
        """[B, L] of values in the order of `where`."""
        target = np.full(shape, fill, values.dtype)
        target[filled] = values
        return torch.from_numpy(target)

    return Microbatch(
        input_ids=spread(rows.token_ids[where].astype(np.int64)),
        position_ids=spread(ramps(lengths)),
        attention_mask=torch.from_numpy(filled),
        loss_mask=spread(rows.trained[where]),
        behavior_logprobs=spread(rows.behavior_logprobs[where]),
        advantages=spread(rows.advantages[where]),
        weights=spread(np.repeat(rows.weights[kept], lengths)),
        versions=spread(rows.versions[where], -1),
        lengths=torch.from_numpy(lengths),
        rows=torch.from_numpy(kept),
        packed=packed,
        token_columns={name: spread(values[where], np.nan) for name, values in added.per_token.items()},
        row_columns={name: torch.from_numpy(values[kept]) for name, values in added.per_row.items()},
    )
