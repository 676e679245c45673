"""Trajectories as Arrow columns: flat buffers plus offsets, never one message per row, never pickle, never padding.

A body is one Arrow IPC stream whose schema metadata carries the control header (a msgspec struct as JSON), so a put
or a get is one request. Neither way copies: writing gathers views of the columns, reading gives views of the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from astraflow.errors import SchemaError

H = TypeVar("H", bound=msgspec.Struct)
CONTENT_TYPE = "application/vnd.apache.arrow.stream"
HEADER_KEY = b"astraflow.header"
_SMALL_PIECE = 4 << 10
_WHOLE_BYTES = 256 << 10  # a smaller stream is put together at once: cheaper than to gather some sixty pieces

TRAJECTORY_SCHEMA = pa.schema(
    [
        pa.field("episode_id", pa.string(), False),
        pa.field("attempt", pa.int32(), False),
        pa.field("group_id", pa.string(), False),
        pa.field("source", pa.string(), False),
        pa.field("row", pa.int64(), False),
        pa.field("epoch", pa.int32(), False),
        pa.field("policy", pa.string(), False),
        pa.field("branch", pa.int32(), False),
        pa.field("parent_branch", pa.int32(), False),
        pa.field("fork_at", pa.int32(), False),
        pa.field("token_ids", pa.list_(pa.int32()), False),
        pa.field("loss_mask", pa.list_(pa.bool_()), False),
        pa.field("behavior_logprobs", pa.list_(pa.float32()), False),
        pa.field("versions", pa.list_(pa.int32()), False),
        pa.field("call_index", pa.list_(pa.int16()), False),
        pa.field("reward", pa.float32(), True),  # null: unscored
        pa.field("rewards_per_call", pa.list_(pa.float32()), False),
        pa.field("finish_reason", pa.string(), False),
        pa.field("truncated", pa.bool_(), False),
    ]
)
"""One row per branch (design section 5). Facts of an episode and of its node are in the header."""

TRAINING_SCHEMA = pa.schema(
    [
        *TRAJECTORY_SCHEMA,
        pa.field("advantages", pa.list_(pa.float32()), False),  # [T] per own token, 0 where not sampled
        pa.field("weight", pa.float32(), False),  # loss weight of the trajectory
        pa.field("engine", pa.string(), False),  # "<engine>@<node>" that sampled it; "": not known
    ]
)

ADDED_TYPES = {"token": pa.list_(pa.float32()), "row": pa.float32(), "reward": pa.float32()}
"""Of what a stage adds (`Stage.adds`)."""

TOKEN_COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "call_index")


def added_schema(adds: Mapping[str, Literal["token", "row", "reward"]]) -> pa.Schema:
    """Of the columns that a stage with these `adds` hands in."""
    return pa.schema([(name, ADDED_TYPES[kind]) for name, kind in adds.items()])


def stream_pieces(
    header: msgspec.Struct,
    table: pa.Table | pa.RecordBatch,
    instead: dict[int, list[memoryview]] | None = None,
) -> list[memoryview]:
    """One Arrow IPC stream with `header` in its schema metadata, as pieces to be sent or written one after the other.

    Large pieces are views of the table's buffers: nothing is copied. Their size is `nbytes`.
    `instead`: what to send for the buffer that begins at an address, of the same length; taken out when it was used.
    """
    metadata = {HEADER_KEY: msgspec.json.encode(header)}
    table = table.replace_schema_metadata(metadata)
    if not instead and table.get_total_buffer_size() < _WHOLE_BYTES:
        whole = pa.BufferOutputStream()
        with pa.ipc.new_stream(whole, table.schema) as writer:
            writer.write(table)
        return [memoryview(whole.getvalue())]
    sink = _Gather(instead)
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        writer.write(table)
    return sink.pieces()


class _Gather:
    """A file for Arrow's writer that keeps what it is given instead of copying it."""

    closed = False

    def __init__(self, instead: dict[int, list[memoryview]] | None) -> None:
        self._instead = instead
        self._pieces: list[memoryview] = []
        self._small = bytearray()

    def write(self, data: bytes | pa.Buffer) -> int:
        views = self._instead.pop(data.address, None) if self._instead and isinstance(data, pa.Buffer) else None
        for view in (memoryview(data),) if views is None else views:
            if view.nbytes < _SMALL_PIECE:
                self._small += view
            else:
                self._end_small()
                self._pieces.append(view)
        return len(data)

    def pieces(self) -> list[memoryview]:
        self._end_small()
        return self._pieces

    def _end_small(self) -> None:
        if self._small:
            self._pieces.append(memoryview(self._small))
            self._small = bytearray()

    def tell(self) -> int:
        return sum(piece.nbytes for piece in self._pieces) + len(self._small)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def write_stream(header: msgspec.Struct, table: pa.Table | pa.RecordBatch) -> pa.Buffer:
    """The stream of `stream_pieces` in one buffer, which supports len() and the buffer protocol."""
    return pa.py_buffer(b"".join(stream_pieces(header, table)))


def read_stream(buffer: bytes | memoryview | pa.Buffer, header_type: type[H]) -> tuple[H, pa.Table]:
    """Inverse of `write_stream`; the columns are views of `buffer`.

    Raises: SchemaError: not an Arrow stream, or no header, or a header of another type.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(buffer)) as reader:
            table = reader.read_all()
        table.validate(full=True)  # offsets out of bounds would be read as memory of the process
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise SchemaError(
            "body", f"{len(buffer)} bytes", f"must be an Arrow IPC stream ({error})", "send " + CONTENT_TYPE
        ) from error
    metadata = table.schema.metadata or {}
    if HEADER_KEY not in metadata:
        raise SchemaError(
            "body", "no header", "must carry 'astraflow.header' in its schema metadata", "use write_stream"
        )
    try:
        header = msgspec.json.decode(metadata[HEADER_KEY], type=header_type)
    except msgspec.DecodeError as error:
        raise SchemaError(
            "astraflow.header", str(error), f"must be a {header_type.__name__}", "use write_stream"
        ) from error
    return header, table.replace_schema_metadata(None)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with exactly this schema, where that changes no value: other order of columns, other flags of what may
    be null, text or lists with 64-bit offsets. The very same table when it has the schema, or cannot be made to."""
    got = table.schema
    if got.equals(schema) or sorted(got.names) != sorted(schema.names):
        return table
    if not all(_alike(got.field(field.name).type, field.type) for field in schema):
        return table
    try:
        return pa.Table.from_arrays([table.column(f.name).cast(f.type) for f in schema], schema=schema)
    except pa.ArrowException:  # more than 32-bit offsets can say
        return table


def _alike(one: pa.DataType, other: pa.DataType) -> bool:
    """They hold the same values."""
    lists, texts = (pa.types.is_list, pa.types.is_large_list), (pa.types.is_string, pa.types.is_large_string)
    if any(known(one) for known in lists) and any(known(other) for known in lists):
        return _alike(one.value_type, other.value_type)
    return one == other or (any(known(one) for known in texts) and any(known(other) for known in texts))


def check_schema(table: pa.Table | pa.RecordBatch, schema: pa.Schema, *, only: bool = False) -> None:
    """Refuse a table that lacks a column, has one of another dtype, or whose token columns differ in length.

    `only`: a column that is not in `schema`, too.
    Raises: SchemaError: naming the column.
    """
    if not table.schema.equals(schema):
        _check_fields(table, schema, only=only)
    for name in _with_nulls(table):
        field = schema.field(name) if name in schema.names else None
        if field is not None and not field.nullable and (row := _first_null(table.column(name))) is not None:
            raise SchemaError(f"column {name}", "null", f"must not be null (row {row})", "fill it")
    ends = _list_ends(table.column("token_ids"))
    for name in TOKEN_COLUMNS[1:]:
        if not np.array_equal(ends, _list_ends(table.column(name))):
            lengths, other = list_lengths(table.column("token_ids")), list_lengths(table.column(name))
            row = int(np.flatnonzero(lengths != other)[0])
            raise SchemaError(
                f"column {name}", int(other[row]), f"must have {int(lengths[row])} entries in row {row}, as token_ids",
                "keep the token columns equally long",
            )  # fmt: skip


def _check_fields(table: pa.Table | pa.RecordBatch, schema: pa.Schema, *, only: bool) -> None:
    names = table.schema.names
    for field in schema:
        if names.count(field.name) != 1:
            rule = "must come once" if field.name in names else "is missing"
            raise SchemaError("column", field.name, rule, f"send it as {field.type}")
        got = table.schema.field(field.name)
        if got.type != field.type:
            raise SchemaError(
                f"column {field.name}", str(got.type), f"must be {field.type}", "it is never cast; convert it"
            )
    if only and (more := [name for name in names if name not in schema.names]):
        raise SchemaError("column", more[0], "is not one of a trajectory", "leave it out; a stage can add columns")


def _list_ends(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Where each list ends; equal for two columns exactly when all their lists are equally long."""
    chunks = _chunks(column)
    if len(chunks) == 1:
        offsets = chunks[0].offsets.to_numpy()
        return np.asarray(offsets[1:] - offsets[0])
    return np.cumsum(list_lengths(column))


def _with_nulls(table: pa.Table | pa.RecordBatch) -> list[str]:
    """Columns that may hold a null, or a list with one: nearly always none, and this is quick."""
    return [
        table.column_names[i]
        for i, column in enumerate(table.columns)
        if column.null_count
        or (isinstance(column.type, pa.ListType) and any(chunk.values.null_count for chunk in _chunks(column)))
    ]


def _first_null(column: pa.ChunkedArray | pa.Array) -> int | None:
    """The first row that is null, or whose list holds a null."""
    start = 0
    for chunk in _chunks(column):
        if chunk.null_count:
            return start + int(np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))[0])
        if pa.types.is_list(chunk.type) and (values := chunk.flatten()).null_count:
            entry = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            return start + int(np.searchsorted(np.cumsum(list_lengths(chunk)), entry, "right"))
        start += len(chunk)
    return None


def list_lengths(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """[rows] int64: entries of each list."""
    parts = [np.diff(c.offsets.to_numpy()) for c in _chunks(column)]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def flat_values(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """[entries] of the list's dtype, one list after the other; zero-copy for one numeric chunk (bools are unpacked)."""
    parts = [_numbers(c.flatten()) for c in _chunks(column)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, column.type.value_type.to_pandas_dtype())


def _chunks(column: pa.ChunkedArray | pa.Array) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _numbers(values: pa.Array) -> np.ndarray:
    if not pa.types.is_boolean(values.type) or values.null_count or not len(values):
        numbers: np.ndarray = values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))
        return numbers
    return unpack_bools(values, 0, len(values))


def unpack_bools(values: pa.BooleanArray, start: int, end: int) -> np.ndarray:
    """[end - start] bool, of values without nulls."""
    if start == end:
        return np.empty(0, np.bool_)  # there may be no buffer
    first, over = divmod(values.offset + start, 8)
    bits = np.frombuffer(values.buffers()[1], np.uint8)[first:]
    return np.unpackbits(bits, count=over + end - start, bitorder="little")[over:].view(np.bool_)
