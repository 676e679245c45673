"""The rows of a batch: where they lie, and the table that a trainer gets. No per-token Python.

Where they lie is a small record of its own: a trainer on the same host gets that record, maps the segments itself and
makes the table (`wire.local`); any other gets the table as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter

import msgspec
import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.records import Batch, Put
from astraflow.dataflow.storage.tokens import token_advantages
from astraflow.wire.codec import TRAINING_SCHEMA, flat_values, list_lengths

_MOST_CHUNKS = 16  # of a batch: more are copied together, since each costs the writer and the reader some 50 us


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one put."""

    put: Put
    rows: list[int]  # rising


class BatchRows(msgspec.Struct, frozen=True):
    """The rows of a batch in the order in which they are stored, and per row what was not stored with it."""

    pieces: list[Piece]
    advantages: list[float]
    weights: list[float]
    call_advantages: list[tuple[float, ...]]  # empty: the advantage of the row holds for all of its calls


def batch_rows(batch: Batch, puts: Mapping[int, Put]) -> BatchRows:
    """Where the rows of a batch lie."""
    needed = sorted(
        (e.part.put, row, e.advantage, g.weight, e.call_advantages)
        for g in batch.groups
        for e in g.entries
        for row in e.part.rows
    )
    pieces = [Piece(puts[key], [m[1] for m in members]) for key, members in groupby(needed, key=itemgetter(0))]
    return BatchRows(pieces, [n[2] for n in needed], [n[3] for n in needed], [n[4] for n in needed])


def rows_table(rows: BatchRows, read: Callable[[Put], pa.Buffer]) -> pa.Table:
    """The rows with `advantages` and `weight`; columns are views of what `read` gives, unless there are many pieces."""
    tables: list[pa.Table] = []
    for piece in rows.pieces:
        with pa.ipc.open_stream(read(piece.put)) as reader:
            table = reader.read_all().replace_schema_metadata(None)
        tables += _pick(table, piece.rows)
    table = pa.concat_tables(tables)
    if len(tables) > _MOST_CHUNKS:
        table = table.combine_chunks()
    lengths = list_lengths(table.column("token_ids"))
    sampled = flat_values(table.column("loss_mask"))
    per_row = np.array(rows.advantages, np.float32)
    call_index = partial(flat_values, table.column("call_index"))
    per_token = token_advantages(per_row, rows.call_advantages, lengths, sampled, call_index)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    advantages = pa.ListArray.from_arrays(offsets, pa.array(per_token, pa.float32()))
    columns = [*table.columns, advantages, pa.array(rows.weights, pa.float32())]
    return pa.Table.from_arrays(columns, schema=TRAINING_SCHEMA)


def batch_table(batch: Batch, puts: Mapping[int, Put], read: Callable[[Put], pa.Buffer]) -> pa.Table:
    """The rows of a batch as a trainer gets them."""
    return rows_table(batch_rows(batch, puts), read)


def _pick(table: pa.Table, rows: list[int]) -> list[pa.Table]:
    """Rows (rising) of a put: a few long runs are views, many short ones are copied at once."""
    ends = [i + 1 for i in range(len(rows)) if i + 1 == len(rows) or rows[i + 1] != rows[i] + 1]
    if len(ends) > 1 and len(ends) * 8 > len(rows):
        return [table.take(rows)]
    starts = [0, *ends[:-1]]
    return [table.slice(rows[start], end - start) for start, end in zip(starts, ends, strict=True)]
