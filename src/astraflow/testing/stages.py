"""Rows and a check for a stage of your own; small stages whose columns can be checked from the outside. Torch-free."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from astraflow.config.stages import TASK_COLUMN, Kind
from astraflow.contracts import Stage
from astraflow.wire.codec import ADDED_TYPES, TRAJECTORY_SCHEMA, flat_values, list_lengths


def stage_rows(needs: Sequence[str], num_episodes: int = 3) -> pa.Table:
    """Rows as a stage with these `needs` gets them: two branches of each episode, the second forks off the first."""
    rows = []
    for i in range(num_episodes):
        size = 4 + i
        rows += [_row(i, 0, -1, 0, size), _row(i, 1, 0, 2, size - 1)]
    tasks = [json.dumps({"question": f"What is {i}+1?", "answer": str(i + 1)}) for i in range(num_episodes)]
    columns = {}
    for name in needs:
        if name == TASK_COLUMN:
            columns[name] = pa.array([text for text in tasks for _ in range(2)], pa.string())
        elif name in TRAJECTORY_SCHEMA.names:
            columns[name] = pa.array([row[name] for row in rows], TRAJECTORY_SCHEMA.field(name).type)
        else:  # of another stage: one float per token
            columns[name] = pa.array([[0.5] * len(row["token_ids"]) for row in rows], pa.list_(pa.float32()))
    return pa.table(columns)


def check_stage(stage: Stage, rows: pa.Table | None = None) -> pa.Table:
    """Run a stage as its worker does, on `rows` (None: `stage_rows`), and refuse what the dataflow service would.

    Raises: AssertionError: naming what does not hold. Gives what the stage added.
    """
    rows = stage_rows(stage.needs) if rows is None else rows
    columns = stage.run(rows)
    assert columns.num_rows == rows.num_rows, f"{columns.num_rows} rows for {rows.num_rows}"
    assert set(columns.column_names) == set(stage.adds), f"adds {columns.column_names}, not {list(stage.adds)}"
    again = stage.run(rows.slice(0, 2))
    assert again.num_rows == 2, "it must work on any rows of whole episodes"
    for name, kind in stage.adds.items():
        column = columns.column(name)
        assert column.type == ADDED_TYPES[kind], f"{name} is {column.type}, not {ADDED_TYPES[kind]}"
        values = column.to_pylist()
        if kind == "token" and "token_ids" in rows.column_names:
            sizes = [len(ids) for ids in rows.column("token_ids").to_pylist()]
            assert [len(row) for row in values] == sizes, f"{name} must have one entry per token"
        numbers = [x for row in values for x in (row if kind == "token" else [row])]
        wrong = [x for x in numbers if (x is None and kind != "reward") or (x is not None and not math.isfinite(x))]
        assert not wrong, f"{name} holds {wrong[0]}"
    return columns


def _row(episode: int, branch: int, parent: int, fork_at: int, size: int) -> dict[str, Any]:
    sampled = [i > 0 for i in range(size)]
    return {
        "episode_id": f"train/0/{episode}/0",
        "attempt": 1,
        "group_id": f"train/0/{episode}",
        "source": "train",
        "row": episode,
        "epoch": 0,
        "policy": "actor",
        "branch": branch,
        "parent_branch": parent,
        "fork_at": fork_at,
        "token_ids": [3 + (episode + i) % 50 for i in range(size)],
        "loss_mask": sampled,
        "behavior_logprobs": [-0.5 if s else 0.0 for s in sampled],
        "versions": [0 if s else -1 for s in sampled],
        "call_index": [branch if s else -1 for s in sampled],
        "reward": float(episode % 2),
        "rewards_per_call": [],
        "finish_reason": "stop",
        "truncated": False,
    }


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
        if self._wrong == "dict":
            return {"echo": column.column("echo")}
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
