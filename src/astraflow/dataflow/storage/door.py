"""Columns that a worker of a stage hands in: checked row by row before anything is kept.

What is wrong with the whole (a column missing, another dtype, other rows than leased) refuses the request and every
entry in it; a wrong value refuses its entry only. A refused entry is offered again with the next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from astraflow.config.stages import StagePlan
from astraflow.dataflow.machine.commands import EntryColumns
from astraflow.dataflow.machine.records import StagedEntry
from astraflow.errors import SchemaError
from astraflow.wire.codec import ADDED_TYPES, list_lengths
from astraflow.wire.messages import ColumnsHeader

_FAILED_CHARS = 4096  # of what went wrong; it is journaled


class Refused(NamedTuple):
    """Why a request, or one entry of it, is refused."""

    reason: str  # what it is counted under: rows, column, dtype, length, not_finite
    error: SchemaError

    @property
    def problem(self) -> str:
        """As `EntryColumns.problem`."""
        return f"{self.reason}: {self.error}"


def check_columns(
    plan: StagePlan,
    header: ColumnsHeader,
    table: pa.Table,
    held: Callable[[str, int], StagedEntry | None],
    token_counts: Callable[[list[StagedEntry]], list[np.ndarray]],
) -> list[EntryColumns] | Refused:
    """The entries of a request as the machine takes them, bad ones with their problem; or why all is refused.

    Args: held: the entry, when the sender holds this attempt of it. token_counts: of each entry, tokens of its rows.
    """
    entries = [held(*lease) for lease in header.leases]
    sizes = _sizes(header)
    for wrong in (_wrong_schema(plan, table), _wrong_rows(plan, header, table, entries, sizes)):
        if wrong is not None:
            return wrong
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    tokens = None
    if "token" in plan.adds.values():
        known = iter(token_counts([entry for entry in entries if entry is not None]))
        counts = [next(known) if e is not None else np.full(n, -1) for e, n in zip(entries, sizes, strict=True)]
        tokens = np.concatenate(counts) if counts else np.empty(0, np.int64)
    bad = _bad_rows(plan, header, table, tokens)
    rewards = table.column("reward").to_pylist() if "reward" in plan.adds else []
    found = []
    for i, (entry_id, attempt) in enumerate(header.leases):
        rows = list(range(int(starts[i]), int(starts[i + 1])))
        problem = next((bad[row].problem for row in rows if row in bad), "")
        reward = next((rewards[row] for row in rows if rewards[row] is not None), None) if rewards else None
        found.append(EntryColumns(entry_id, attempt, rows, None if problem else reward, problem))
    found += [
        EntryColumns(e, attempt, [], None, f"failed: {text[:_FAILED_CHARS]}") for e, attempt, text in header.failed
    ]
    return found


def _sizes(header: ColumnsHeader) -> list[int]:
    """Rows of each lease, by the row ids that follow each other."""
    counts = Counter(row_id.rpartition(":")[0] for row_id in header.row_ids)
    return [counts.get(entry_id, 0) for entry_id, _ in header.leases]


def _wrong_schema(plan: StagePlan, table: pa.Table) -> Refused | None:
    where = f"stages.{plan.name}.columns"
    names = table.column_names
    for name, kind in plan.adds.items():
        if names.count(name) != 1:
            return Refused(
                "column", SchemaError(where, names, f"must hold '{name}' once", f"add it as {ADDED_TYPES[kind]}")
            )
        got = table.schema.field(name).type
        if got != ADDED_TYPES[kind]:
            error = SchemaError(
                f"{where}.{name}", str(got), f"must be {ADDED_TYPES[kind]}", "it is never cast; convert it"
            )
            return Refused("dtype", error)
    extra = [name for name in names if name not in plan.adds]
    if extra:
        known = ", ".join(plan.adds)
        return Refused("column", SchemaError(where, extra[0], f"is not added by this stage ({known})", "leave it out"))
    return None


def _wrong_rows(
    plan: StagePlan, header: ColumnsHeader, table: pa.Table, entries: list[StagedEntry | None], sizes: list[int]
) -> Refused | None:
    where, fix = f"stages.{plan.name}.row_ids", "send exactly the rows of the lease, in its order"
    if len(header.row_ids) != table.num_rows:
        rule = f"are named, but {table.num_rows} rows came"
        return Refused("rows", SchemaError(where, f"{len(header.row_ids)} rows", rule, fix))
    if len({e for e, _ in header.leases} | {e for e, _, _ in header.failed}) != len(header.leases) + len(header.failed):
        return Refused("rows", SchemaError(where, header.leases, "must name each entry once", fix))
    expected = [
        f"{entry_id}:{i}"
        for (entry_id, _), entry, size in zip(header.leases, entries, sizes, strict=True)
        for i in range(size if entry is None else len(entry.part.rows))
    ]
    if header.row_ids != expected:
        pairs = zip([*header.row_ids, "nothing"], [*expected, "nothing"], strict=False)
        at, (got, wanted) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return Refused("rows", SchemaError(f"{where}[{at}]", got, f"must be {wanted}", fix))
    return None


def _bad_rows(plan: StagePlan, header: ColumnsHeader, table: pa.Table, tokens: np.ndarray | None) -> dict[int, Refused]:
    """Row number -> the first thing that is wrong with it. `tokens`: of each row; -1: not known."""
    bad: dict[int, Refused] = {}
    for name, kind in plan.adds.items():
        column = table.column(name)
        if kind == "token" and tokens is not None:
            lengths = _lengths(column)
            for row in np.flatnonzero((lengths != tokens) & (tokens >= 0)).tolist():
                rule = f"must have {tokens[row]} entries in row {header.row_ids[row]} (number {row}), one per token"
                got = "null" if lengths[row] < 0 else int(lengths[row])
                error = SchemaError(f"stages.{plan.name}.columns.{name}", got, rule, "do not cut or pad")
                bad.setdefault(row, Refused("length", error))
        for row, value in _not_finite(column, kind):
            rule = f"must be a finite number in row {header.row_ids[row]} (number {row})"
            fix = "null is unscored" if kind == "reward" else "report the entry as failed instead"
            error = SchemaError(f"stages.{plan.name}.columns.{name}", value, rule, fix)
            bad.setdefault(row, Refused("not_finite", error))
    return bad


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Entries of each list; -2 for a null list."""
    if not column.null_count:
        return list_lengths(column)
    lengths: np.ndarray = pc.fill_null(pc.list_value_length(column), -2).to_numpy().astype(np.int64)
    return lengths


def _not_finite(column: pa.ChunkedArray, kind: str) -> Iterator[tuple[int, object]]:
    """Rows with a value that is no finite number, and that value. A reward may be null."""
    if kind == "token":
        values, lengths = pc.list_flatten(column), np.maximum(_lengths(column), 0)
        row_of = np.repeat(np.arange(len(lengths)), lengths)
    else:
        values, row_of = column, np.arange(len(column))
    finite = pc.fill_null(pc.is_finite(values), kind == "reward").to_numpy()
    for at in np.flatnonzero(~finite).tolist():
        yield int(row_of[at]), values[at].as_py()
