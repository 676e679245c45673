"""The rows of a batch: where they lie, and the table that a trainer gets. No per-token Python.

Where they lie is a small record of its own: a trainer on the same host gets that record, maps the segments itself and
makes the table (`wire.local`); any other gets the table as a stream.

```
 entries ─► (put, row) sorted ─► runs of rows, views of the segments ─► one table ─► + columns that stages added
                                                                             └► share of a rank ─► + advantages, weight
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.records import Batch, Entry, Put, StagedEntry
from astraflow.dataflow.storage.balance import share
from astraflow.dataflow.storage.tokens import token_advantages
from astraflow.wire.codec import TRAINING_SCHEMA, flat_values, list_lengths

Read = Callable[[Put], pa.Buffer]
Branches = Literal["each", "once"]  # how `policies.*.batch.branches` weighs an episode that forked
_MOST_CHUNKS = 16  # of a batch: more are copied together, since each costs the writer and the reader some 50 us


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one put."""

    put: Put
    rows: list[int]  # rising


class AddedRows(msgspec.Struct, frozen=True):
    """The columns that one stage added."""

    pieces: list[Piece]
    places: list[int]  # for each row of `pieces`: the number of the row that it is added to


class EntryRows(msgspec.Struct, frozen=True):
    """Rows of entries in the order in which they are stored; rows of an entry are together and in order."""

    pieces: list[Piece]
    owners: list[int]  # for each row: number of its entry
    added: list[AddedRows]


class BatchRows(msgspec.Struct, frozen=True):
    """The rows of a batch, and per episode what was not stored with them."""

    rows: EntryRows
    advantages: list[float]
    weights: list[float]
    call_advantages: list[tuple[float, ...]]  # empty: the advantage of the episode holds for all of its calls
    engines: list[str]  # see `Part.engine`
    rank: int = 0  # the share that is wanted, of `ranks`
    ranks: int = 1


def entry_rows(entries: Sequence[Entry | StagedEntry], puts: Mapping[int, Put]) -> EntryRows:
    """Where the rows of these entries lie (at least one), and what stages added to them."""
    counts, puts_of, listed = [], [], list[int]()
    for entry in entries:  # one pass: each entry is some cache misses, and a batch has hundreds
        part = entry.part
        counts.append(len(part.rows))
        puts_of.append(part.put)
        listed += part.rows
    keys = np.repeat(np.array(puts_of, np.int64), counts)
    rows = np.array(listed, np.int64)
    order = np.lexsort((rows, keys))
    owners = np.repeat(np.arange(len(entries)), counts)[order]
    added = []
    for stage in dict.fromkeys(a.stage for e in entries for a in e.added):
        found = [next((a for a in reversed(e.added) if a.stage == stage), None) for e in entries]
        of_stage = np.repeat(np.array([a.put if a is not None else -1 for a in found], np.int64), counts)[order]
        numbers = np.array(
            [n for a, e in zip(found, entries, strict=True) for n in (a.rows if a is not None else e.part.rows)]
        )[order]
        places = np.flatnonzero(of_stage >= 0)
        places = places[np.lexsort((numbers[places], of_stage[places]))]
        added.append(AddedRows(_pieces(of_stage[places], numbers[places], puts), places.tolist()))
    return EntryRows(_pieces(keys[order], rows[order], puts), owners.tolist(), added)


def entry_table(rows: EntryRows, read: Read) -> pa.Table:
    """The rows with what stages added; columns are views of what `read` gives, unless there are many pieces.

    A value added under a name that rows have already replaces that of the row. It is null where an entry lacks it.
    """
    table = _table(rows.pieces, read)
    for added in rows.added:
        more = _table(added.pieces, read)
        if added.places != list(range(table.num_rows)):
            index = np.full(table.num_rows, -1, np.int64)
            index[added.places] = np.arange(len(added.places))
            more = more.take(pa.array(index, mask=index < 0))
        for field in more.schema:
            field = field.with_nullable(True)
            at, column = table.schema.get_field_index(field.name), more.column(field.name)
            if at < 0:
                table = table.append_column(field, column)
            else:
                import pyarrow.compute as pc  # takes a while to load, and few runs need it

                table = table.set_column(at, field, pc.coalesce(column, table.column(at)))
    return table


def batch_rows(
    batch: Batch, puts: Mapping[int, Put], rank: int = 0, ranks: int = 1, branches: Branches = "each"
) -> BatchRows:
    """Where the rows of a batch lie. `branches`: "once": those of an episode share its weight."""
    entries = [e for g in batch.groups for e in g.entries]
    shares = [len(e.part.rows) if branches == "once" else 1 for e in entries]
    of_groups = [g.weight for g in batch.groups for _ in g.entries]
    weights = [weight / share for weight, share in zip(of_groups, shares, strict=True)]
    return BatchRows(
        rows=entry_rows(entries, puts),
        advantages=[e.advantage for e in entries],
        weights=weights,
        call_advantages=[e.call_advantages for e in entries],
        engines=[e.part.engine for e in entries],
        rank=rank,
        ranks=ranks,
    )


def rows_table(rows: BatchRows, read: Read) -> pa.Table:
    """The rows of a batch, or of the share of one rank: `wire.codec.TRAINING_SCHEMA`, then what stages added."""
    table, owners = entry_table(rows.rows, read), np.array(rows.rows.owners, np.int64)
    if rows.ranks > 1:
        mine = share(list_lengths(table.column("token_ids")), owners, rows.rank, rows.ranks)
        table, owners = table.take(mine), owners[mine]
    lengths = list_lengths(table.column("token_ids"))
    sampled = flat_values(table.column("loss_mask"))
    per_row = np.array(rows.advantages, np.float32)[owners]
    calls = [rows.call_advantages[i] for i in owners.tolist()]
    per_token = token_advantages(per_row, calls, lengths, sampled, partial(flat_values, table.column("call_index")))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    made = {
        "advantages": pa.ListArray.from_arrays(offsets, pa.array(per_token, pa.float32())),
        "weight": pa.array(np.array(rows.weights, np.float32)[owners], pa.float32()),
        "engine": pa.array([rows.engines[i] for i in owners.tolist()], pa.string()),
    }
    more = [field for field in table.schema if field.name not in TRAINING_SCHEMA.names]
    columns = [made[name] if name in made else table.column(name) for name in TRAINING_SCHEMA.names]
    return pa.Table.from_arrays(
        [*columns, *(table.column(field.name) for field in more)], schema=pa.schema([*TRAINING_SCHEMA, *more])
    )


def batch_table(
    batch: Batch, puts: Mapping[int, Put], read: Read, rank: int = 0, ranks: int = 1, branches: Branches = "each"
) -> pa.Table:
    """The rows of a batch, or of the share of one rank, as a trainer gets them."""
    return rows_table(batch_rows(batch, puts, rank, ranks, branches), read)


def _pieces(keys: np.ndarray, rows: np.ndarray, puts: Mapping[int, Put]) -> list[Piece]:
    """Rows sorted by put and number."""
    starts = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
    numbers, ends = rows.tolist(), [*starts[1:], len(keys)]
    return [Piece(puts[int(keys[a])], numbers[a:b]) for a, b in zip(starts, ends, strict=True)]


def _table(pieces: Sequence[Piece], read: Read) -> pa.Table:
    tables: list[pa.Table] = []
    for piece in pieces:
        with pa.ipc.open_stream(read(piece.put)) as reader:
            tables += _pick(reader.read_all(), piece.rows)
    table = (pa.concat_tables(tables) if len(tables) > 1 else tables[0]).replace_schema_metadata(None)
    return table.combine_chunks() if len(tables) > _MOST_CHUNKS else table


def _pick(table: pa.Table, rows: list[int]) -> list[pa.Table]:
    """Rows (rising) of a put: a few long runs are views, many short ones are copied at once."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return [table if len(rows) == table.num_rows else table.slice(rows[0], len(rows))]
    ends = [i + 1 for i in range(len(rows)) if i + 1 == len(rows) or rows[i + 1] != rows[i] + 1]
    if len(ends) * 8 > len(rows):
        return [table.take(rows)]
    starts = [0, *ends[:-1]]
    return [table.slice(rows[start], end - start) for start, end in zip(starts, ends, strict=True)]
