"""Episodes as a commit: one Arrow stream, every trajectory one row (columns: `codec.TRAJECTORY_SCHEMA`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from astraflow.errors import SchemaError
from astraflow.types import Episode, Trajectory
from astraflow.wire.codec import TOKEN_COLUMNS, TRAJECTORY_SCHEMA, stream_pieces
from astraflow.wire.messages import EpisodeHeader, EpisodesHeader, NextLeases

Join = Callable[[Sequence[np.ndarray]], np.ndarray]
_FIELDS = [(field.name, field.type) for field in TRAJECTORY_SCHEMA]
_DTYPES = {n: np.dtype(TRAJECTORY_SCHEMA.field(n).type.value_type.to_pandas_dtype()) for n in TOKEN_COLUMNS}
_MANY_TOKENS = 1 << 16  # below, a few large pieces are quicker than many small ones


def episode_pieces(
    episodes: Sequence[Episode], node_id: str, engines: Mapping[str, str] | None = None, more: NextLeases | None = None
) -> list[memoryview]:
    """The stream of one commit (`codec.stream_pieces`). The tokens of large trajectories are not even put together.

    They are sent in the place of buffers that are never filled, which saves the page faults of fresh memory.
    `engines`, `more`: see `EpisodesHeader`.
    """
    if sum(len(t.token_ids) for e in episodes for t in e.trajectories) < _MANY_TOKENS:
        return _pieces(*encode_episodes(episodes, node_id, engines), more)
    later = _Later()
    header, rows = encode_episodes(episodes, node_id, engines, later.join)
    header.next = more
    pieces = stream_pieces(header, rows, later.parts)
    if later.parts:  # the writer copied a buffer
        return _pieces(*encode_episodes(episodes, node_id, engines), more)
    return pieces


def _pieces(header: EpisodesHeader, rows: pa.RecordBatch, more: NextLeases | None) -> list[memoryview]:
    header.next = more
    return stream_pieces(header, rows)


class _Later:
    """Joins arrays by standing for them: the same length, never filled."""

    def __init__(self) -> None:
        self.parts: dict[int, list[memoryview]] = {}  # address of the joined array -> what to send for it
        self._kept: list[np.ndarray] = []

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        flat = np.empty(sum(map(len, arrays)), arrays[0].dtype)
        self._kept.append(flat)
        self.parts[flat.ctypes.data] = [np.ascontiguousarray(a).data for a in arrays]
        return flat


def encode_episodes(
    episodes: Sequence[Episode],
    node_id: str,
    engines: Mapping[str, str] | None = None,
    join: Join = np.concatenate,
) -> tuple[EpisodesHeader, pa.RecordBatch]:
    """Header and rows of one commit; the rows of an episode are contiguous and in the order of the headers.

    `join`: makes one column of the tokens of all rows (the mask is always put together: it is packed into bits).
    """
    headers, rows = [], []
    own: list[
        tuple[str, int, str, str, int, int]
    ] = []  # of each row: episode_id, attempt, group_id, source, row, epoch
    for episode in episodes:
        trajectories, task, episode_id = episode.trajectories, episode.task, episode.episode_id
        headers.append(
            EpisodeHeader(
                episode_id=episode_id,
                attempt=episode.attempt,
                num_rows=len(trajectories),
                error=episode.error,
                metrics=episode.metrics,
                wall_s=episode.wall_s,
                code=episode.code,
                engines=episode.engines,
            )
        )
        group_id = episode_id.rpartition("/")[0] or task.group_id
        own += [(episode_id, episode.attempt, group_id, task.source, task.row, task.epoch)] * len(trajectories)
        rows += trajectories
    columns: list[Sequence[Any]] = [*zip(*own, strict=True)] if own else [()] * 6
    lengths = [len(t.token_ids) for t in rows]
    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int32))
    arrays = [pa.array(values, kind) for values, (_, kind) in zip(columns, _FIELDS, strict=False)]
    for name, kind in _FIELDS[len(arrays) :]:
        values = [*map(attrgetter(name), rows)]
        if name in _DTYPES:
            _check_parts(name, values, lengths, rows)
            flat = (np.concatenate if name == "loss_mask" else join)(values or [np.empty(0, _DTYPES[name])])
            arrays.append(pa.ListArray.from_arrays(offsets, _values(flat), type=kind))
        else:
            arrays.append(pa.array(values, kind))
    header = EpisodesHeader(node_id=node_id, episodes=headers, engines=dict(engines or {}))
    return header, pa.RecordBatch.from_arrays(arrays, schema=TRAJECTORY_SCHEMA)


def _check_parts(name: str, parts: Sequence[np.ndarray], lengths: list[int], rows: Sequence[Trajectory]) -> None:
    """The arrays of one token column fit the others."""
    if [*map(len, parts)] == lengths and {part.dtype for part in parts} <= {_DTYPES[name]}:
        return
    for trajectory, part in zip(rows, parts, strict=True):
        if len(part) != len(trajectory.token_ids):
            raise SchemaError(
                name, len(part), f"must have one entry per token ({len(trajectory.token_ids)})",
                "keep ids, mask, logprobs, versions and call_index of a trajectory equally long",
            )  # fmt: skip
        if part.dtype != _DTYPES[name]:
            raise SchemaError(name, str(part.dtype), f"must be {_DTYPES[name]}", "convert it at its source")


def _values(flat: np.ndarray) -> pa.Array:
    """An Arrow array over `flat`; bools are packed by numpy (measured: seven times as fast as `pa.array`)."""
    if flat.dtype != np.bool_:
        return pa.array(flat)
    packed = pa.py_buffer(np.packbits(flat, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(flat), [None, packed])
