"""Tokens of stored rows for operators that ask for them, and credit spread over tokens. No per-token Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.records import Put
from astraflow.dataflow.storage.segments import DamagedRows
from astraflow.errors import DataflowError
from astraflow.types import Tokens
from astraflow.wire.codec import TOKEN_COLUMNS, flat_values, list_lengths


class TokenReader:
    """Gives the tokens of rows of a put. The put read last stays decoded: siblings often lie in one.

    `damaged`: what could not be read, for whoever has to tell of it.
    """

    def __init__(self, read: Callable[[Put], pa.Buffer]) -> None:
        self._read = read
        self.damaged: list[DamagedRows] = []
        self._put: Put | None = None
        self._columns: list[np.ndarray] = []
        self._ends = np.zeros(1, np.int64)

    def __call__(self, put: Put, rows: Sequence[int]) -> list[Tokens]:
        """One for each of these rows, as read-only views.

        Raises: DamagedRows.
        """
        if put != self._put:
            try:
                body = self._read(put)
            except DamagedRows as error:
                self.damaged.append(error)
                raise
            with pa.ipc.open_stream(body) as stream:
                table = stream.read_all()
            self._columns = [flat_values(table.column(name)) for name in TOKEN_COLUMNS]
            for column in self._columns:
                column.flags.writeable = False
            self._ends = np.concatenate([[0], np.cumsum(list_lengths(table.column("token_ids")))])
            self._put = put
        return [Tokens(*(c[self._ends[row] : self._ends[row + 1]] for c in self._columns)) for row in rows]


def token_advantages(
    advantages: np.ndarray,
    calls: Sequence[Sequence[float]],
    lengths: np.ndarray,
    sampled: np.ndarray,
    call_index: Callable[[], np.ndarray],
) -> np.ndarray:
    """[tokens] float32: the advantage of each sampled token, 0 for given ones.

    Args: advantages: [rows] float32. calls: [rows] advantages per call, which replace that of the row unless empty.
    lengths: [rows] tokens. sampled: [tokens] bool. call_index: gives [tokens] int16; asked for only if needed.
    Raises: DataflowError: a token belongs to a call that has no advantage.
    """
    if not any(calls):
        spread = np.repeat(advantages, lengths)
        spread *= sampled  # in place: fresh memory costs more than the product
        return spread
    sizes = np.array([len(c) for c in calls], np.int64)
    known = [c or (a,) for c, a in zip(calls, advantages.tolist(), strict=True)]
    flat = np.fromiter((value for values in known for value in values), np.float32)
    starts = np.concatenate([[0], np.cumsum(np.maximum(sizes, 1))])[:-1]
    within = np.where(np.repeat(sizes > 0, lengths), np.maximum(call_index(), 0), 0)
    if (beyond := sampled & (within >= np.repeat(np.maximum(sizes, 1), lengths))).any():
        token = int(np.flatnonzero(beyond)[0])
        row = int(np.searchsorted(np.cumsum(lengths), token, side="right"))
        raise DataflowError(
            f"row {row} call_index", int(within[token]), f"is a call without an advantage ({sizes[row]} are known)",
            "let the operator make one for each call",
        )  # fmt: skip
    return np.where(sampled, flat[np.repeat(starts, lengths) + within * sampled], np.float32(0))
