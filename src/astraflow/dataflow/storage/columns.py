"""What a stage reads: the rows of leased entries with the columns that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from astraflow.config.stages import ROW_COLUMNS
from astraflow.dataflow.machine.records import Put, StagedEntry
from astraflow.dataflow.storage.batches import Read, entry_rows, entry_table
from astraflow.wire.codec import TRAJECTORY_SCHEMA, list_lengths


class StagedRows(NamedTuple):
    """Rows of entries; those of one entry are together and in order."""

    order: list[int]  # entries in the order of their rows
    table: pa.Table


def staged_rows(
    entries: Sequence[StagedEntry], needs: Sequence[str], puts: Mapping[int, Put], read: Read
) -> StagedRows:
    """The columns `needs`, of the rows as they were committed or added by stages that are done with all `entries`."""
    if not entries:
        return StagedRows([], TRAJECTORY_SCHEMA.empty_table().select([n for n in needs if n in ROW_COLUMNS]))
    rows = entry_rows(entries, puts)
    return StagedRows(list(dict.fromkeys(rows.owners)), entry_table(rows, read).select(list(needs)))


def token_counts(entries: Sequence[StagedEntry], puts: Mapping[int, Put], read: Read) -> list[np.ndarray]:
    """Of each entry [rows] int64: tokens of its rows. Each put is opened once."""
    of_put: dict[int, np.ndarray] = {}
    for key in {entry.part.put for entry in entries}:
        with pa.ipc.open_stream(read(puts[key])) as reader:
            of_put[key] = list_lengths(reader.read_all().column("token_ids"))
    return [of_put[entry.part.put][entry.part.rows] for entry in entries]
