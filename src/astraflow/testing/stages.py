"""Small stages whose columns can be checked from the outside. Torch-free."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa

from astraflow.config.stages import Kind
from astraflow.wire.codec import flat_values, list_lengths


class EchoStage:
    """Adds `echo`: every token id as a float. `delay_s`: of each call; `wrong`: what a broken stage would do."""

    needs: ClassVar[tuple[str, ...]] = ("token_ids",)
    adds: ClassVar[Mapping[str, Kind]] = {"echo": "token"}

    def __init__(self, *, delay_s: float = 0.0, wrong: str = "") -> None:
        self._delay_s, self._wrong, self._pause = delay_s, wrong, threading.Event()

    def run(self, rows: pa.Table) -> pa.Table:
        """One float for each token."""
        if self._delay_s:
            self._pause.wait(self._delay_s)
        values = flat_values(rows.column("token_ids")).astype(np.float32)
        lengths = list_lengths(rows.column("token_ids"))
        column = self._column("echo", values, lengths)
        return column.slice(1) if self._wrong == "rows" else column

    def _column(self, name: str, values: np.ndarray, lengths: np.ndarray) -> pa.Table:
        match self._wrong:
            case "raises":
                raise RuntimeError("this stage is broken")
            case "length":
                lengths = lengths.copy()
                lengths[0], values = lengths[0] - 1, values[1:]
            case "nan":
                values[0] = np.nan
            case "dtype":
                values = values.astype(np.float64)
            case "missing":
                name = "ecco"
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        table = pa.table({name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))})
        return table.append_column("more", pa.array(lengths)) if self._wrong == "extra" else table

    def close(self) -> None:
        """Nothing is held."""


class EchoSumStage:
    """Adds `echo_sum`: the sum of `echo` in each row, so it comes after EchoStage."""

    needs: ClassVar[tuple[str, ...]] = ("echo",)
    adds: ClassVar[Mapping[str, Kind]] = {"echo_sum": "row"}

    def run(self, rows: pa.Table) -> pa.Table:
        """One float for each row."""
        sums = [sum(values) for values in rows.column("echo").to_pylist()]
        return pa.table({"echo_sum": pa.array(sums, pa.float32())})

    def close(self) -> None:
        """Nothing is held."""


class LengthReward:
    """Adds the reward: `scale` times the tokens of a row, plus the number of fields of its task; `unscored`: none."""

    needs: ClassVar[tuple[str, ...]] = ("loss_mask", "task")
    adds: ClassVar[Mapping[str, Kind]] = {"reward": "reward"}

    def __init__(self, *, scale: float = 1.0, unscored: bool = False) -> None:
        self._scale, self._unscored = scale, unscored

    def run(self, rows: pa.Table) -> pa.Table:
        """One reward for each row."""
        lengths = list_lengths(rows.column("loss_mask")) * self._scale
        fields = [len(json.loads(text)) for text in rows.column("task").to_pylist()]
        rewards = [None if self._unscored else float(a + b) for a, b in zip(lengths, fields, strict=True)]
        return pa.table({"reward": pa.array(rewards, pa.float32())})

    def close(self) -> None:
        """Nothing is held."""


class EchoReward(LengthReward):
    """A reward that needs a column of another stage, so that one comes before the operators, too."""

    needs: ClassVar[tuple[str, ...]] = ("echo", "loss_mask", "task")
