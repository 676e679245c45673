"""Rows by their place, in any order and with any of their columns; and what stages added to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.records import Added, Put, StagedEntry
from astraflow.wire.codec import list_lengths

Place = tuple[int, int]
"""`Put.key`, row number within the put."""
Read = Callable[[Put], pa.Buffer]


def open_put(put: Put, read: Read) -> pa.Table:
    """All rows of a put, as views of its segment."""
    with pa.ipc.open_stream(read(put)) as reader:
        return reader.read_all().replace_schema_metadata(None)


def gather(places: Sequence[Place], names: Sequence[str] | None, puts: Mapping[int, Put], read: Read) -> pa.Table:
    """The columns `names` (None: all of the first put) of the rows at `places`, in their order, in one chunk."""
    order = sorted(range(len(places)), key=places.__getitem__)
    pieces = []
    for key, members in groupby((places[i] for i in order), key=itemgetter(0)):
        rows = [row for _, row in members]
        table = open_put(puts[key], read)
        names = names or table.column_names
        table = table.select(list(names))
        whole = rows[-1] - rows[0] + 1 == len(rows)
        pieces.append(table.slice(rows[0], len(rows)) if whole else table.take(rows))
    table = pa.concat_tables(pieces).combine_chunks()
    if any(i != k for k, i in enumerate(order)):
        table = table.take(np.argsort(order))
    return table


def staged_rows(
    entries: Sequence[StagedEntry], needs: Sequence[str], puts: Mapping[int, Put], read: Read, schema: pa.Schema
) -> pa.Table:
    """What a stage reads of leased entries: columns of the rows as committed (`schema`) and of other stages."""
    if not entries:
        return schema.empty_table().select([n for n in needs if n in schema.names])
    columns = {}
    if own := [n for n in needs if n in schema.names]:
        table = gather([(e.part.put, row) for e in entries for row in e.part.rows], own, puts, read)
        columns = dict(zip(own, table.columns, strict=True))
    if len(own) < len(needs):
        columns |= _added([(e.added, i) for e in entries for i in range(len(e.part.rows))], puts, read)
    return pa.table({name: columns[name] for name in needs})


def with_added(
    table: pa.Table, owners: Sequence[tuple[Sequence[Added], int]], puts: Mapping[int, Put], read: Read
) -> pa.Table:
    """`table` and the columns that stages added to its rows; a column of the same name (the reward) is replaced.

    Args: owners: per row, what was added to its entry, and the number of the row within the entry.
    """
    for name, column in _added(owners, puts, read).items():
        index = table.schema.get_field_index(name)
        if index >= 0:
            table = table.set_column(index, table.schema.field(index), column)
        else:
            table = table.append_column(name, column)
    return table


def _added(
    owners: Sequence[tuple[Sequence[Added], int]], puts: Mapping[int, Put], read: Read
) -> dict[str, pa.ChunkedArray]:
    """The columns that stages added to all of these rows."""
    columns: dict[str, pa.ChunkedArray] = {}
    for stage in [a.stage for a in owners[0][0]] if owners else []:
        found = [next((a for a in added if a.stage == stage), None) for added, _ in owners]
        places = [(a.put, a.rows[i]) for a, (_, i) in zip(found, owners, strict=True) if a is not None]
        if len(places) == len(owners):
            table = gather(places, None, puts, read)
            columns |= dict(zip(table.column_names, table.columns, strict=True))
    return columns


def token_counts(entry: StagedEntry, puts: Mapping[int, Put], read: Read) -> np.ndarray:
    """[rows of the entry] int64: tokens of each."""
    counts: np.ndarray = list_lengths(open_put(puts[entry.part.put], read).column("token_ids"))[entry.part.rows]
    return counts
