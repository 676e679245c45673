"""A batch for a trainer on the same host: where its rows lie, instead of the rows (`wire.local`)."""

from __future__ import annotations

import msgspec
import pyarrow as pa

from astraflow.dataflow.machine.records import Put
from astraflow.dataflow.storage.batches import BatchRows, rows_table
from astraflow.dataflow.storage.segments import Segments, map_segment, segment_name
from astraflow.types import BatchHeader
from astraflow.wire.local import MIN_BYTES, open_place


class SharedBatch(msgspec.Struct, frozen=True):
    """Answer to a trainer that may map the segments."""

    header: BatchHeader
    place: str  # of the segments
    rows: BatchRows


def worth_sharing(rows: BatchRows) -> bool:
    """Enough bytes that mapping them is quicker than sending them."""
    return sum(put.length for put in _puts(rows)) >= MIN_BYTES


def share_batch(header: BatchHeader, rows: BatchRows, segments: Segments) -> SharedBatch:
    """The answer; the rows are checked here, so that damage is found on the same side as ever.

    Raises: DamagedRows: some are not what was written.
    """
    for put in _puts(rows):
        segments.read(put)
    return SharedBatch(header, segments.place, rows)


def shared_table(batch: SharedBatch) -> pa.Table | None:
    """The rows as views of the mapped segments; None: they are not to be seen from here, or gone meanwhile.

    A map outlives the name of its file: what was mapped in time stays whole when the service deletes the segment.
    """
    place = open_place(batch.place)
    if place is None:
        return None
    try:
        maps = {n: map_segment(place / segment_name(n)) for n in {put.segment for put in _puts(batch.rows)}}
    except OSError:
        return None
    return rows_table(batch.rows, lambda put: maps[put.segment].slice(put.offset, put.length))


def _puts(rows: BatchRows) -> list[Put]:
    return [p.put for pieces in (rows.rows.pieces, *(a.pieces for a in rows.rows.added)) for p in pieces]
