"""Columns survive the wire bit for bit; a wrong column is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from astraflow.errors import SchemaError
from astraflow.types import Episode, Task, Trajectory
from astraflow.wire import episodes as episodes_module
from astraflow.wire.codec import (
    TRAJECTORY_SCHEMA,
    check_schema,
    fitted,
    flat_values,
    list_lengths,
    read_stream,
    stream_pieces,
    write_stream,
)
from astraflow.wire.episodes import encode_episodes, episode_pieces
from astraflow.wire.messages import EpisodesHeader, Ok


def trajectory(num_tokens: int, marker: int = 0, **changes: object) -> Trajectory:
    logprobs = np.full(num_tokens, -0.5, np.float32)
    if num_tokens:
        logprobs[marker % num_tokens] = -7.25
    fields = {
        "policy": "actor",
        "branch": 0,
        "parent_branch": -1,
        "fork_at": 0,
        "token_ids": np.arange(num_tokens, dtype=np.int32),
        "loss_mask": np.arange(num_tokens) % 2 == 1,
        "behavior_logprobs": logprobs,
        "versions": np.full(num_tokens, 3, np.int32),
        "call_index": np.zeros(num_tokens, np.int16),
        "reward": 0.5,
        "rewards_per_call": (0.25, 0.5),
    }
    return Trajectory(**{**fields, **changes})


def episode(lengths: list[int], k: int = 0) -> Episode:
    task = Task("train", 4, 1, {"question": "?"})
    return Episode(
        episode_id=f"train/1/4/{k}",
        attempt=1,
        node_id="n",
        task=task,
        trajectories=[trajectory(n, i) for i, n in enumerate(lengths)],
        metrics={"success": 1.0},
    )


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4))
def test_episodes_survive_the_wire_with_each_marker_on_its_token(shape: list[list[int]]) -> None:
    episodes = [episode(lengths, k) for k, lengths in enumerate(shape)]
    header, table = read_stream(write_stream(*encode_episodes(episodes, "n")), EpisodesHeader)
    check_schema(table, TRAJECTORY_SCHEMA)
    assert [e.num_rows for e in header.episodes] == [len(lengths) for lengths in shape]
    rows = [t for e in episodes for t in e.trajectories]
    assert list_lengths(table["token_ids"]).tolist() == [len(t.token_ids) for t in rows]
    logprobs = flat_values(table["behavior_logprobs"])
    assert logprobs.tobytes() == b"".join(t.behavior_logprobs.tobytes() for t in rows)
    assert flat_values(table["loss_mask"]).tolist() == [bool(m) for t in rows for m in t.loss_mask]
    assert table["group_id"].to_pylist() == ["train/1/4"] * len(rows)


def test_reading_copies_no_token_column() -> None:
    buffer = write_stream(*encode_episodes([episode([64])], "n"))
    _, table = read_stream(buffer, EpisodesHeader)
    ids = table["token_ids"].chunk(0).values.buffers()[1]
    assert buffer.address <= ids.address < buffer.address + buffer.size


def test_trajectory_with_a_short_column_is_refused_before_it_is_sent() -> None:
    short = trajectory(4, versions=np.zeros(3, np.int32))
    bad = Episode(episode_id="a/0", attempt=1, node_id="n", task=Task("a", 0, 0, {}), trajectories=[short])
    with pytest.raises(SchemaError, match=r"versions=3 must have one entry per token \(4\)"):
        encode_episodes([bad], "n")


def test_a_wrong_dtype_is_an_error_that_names_the_column_never_a_cast() -> None:
    wide = trajectory(4, token_ids=np.arange(4, dtype=np.int64))
    bad = Episode(episode_id="a/0", attempt=1, node_id="n", task=Task("a", 0, 0, {}), trajectories=[wide])
    with pytest.raises(SchemaError, match="token_ids=int64 must be int32"):
        encode_episodes([bad], "n")
    _, table = read_stream(write_stream(*encode_episodes([episode([3])], "n")), EpisodesHeader)
    index = table.schema.get_field_index("reward")
    doubled = table.set_column(index, "reward", table["reward"].cast(pa.float64()))
    with pytest.raises(SchemaError, match="column reward=double must be float"):
        check_schema(doubled, TRAJECTORY_SCHEMA)
    with pytest.raises(SchemaError, match="column=reward is missing"):
        check_schema(table.drop_columns(["reward"]), TRAJECTORY_SCHEMA)


def test_token_columns_of_different_length_are_refused_by_row() -> None:
    _, table = read_stream(write_stream(*encode_episodes([episode([2, 3])], "n")), EpisodesHeader)
    index = table.schema.get_field_index("versions")
    broken = table.set_column(index, table.schema.field(index), pa.array([[1, 1], [1]], pa.list_(pa.int32())))
    with pytest.raises(SchemaError, match="column versions=1 must have 3 entries in row 1"):
        check_schema(broken, TRAJECTORY_SCHEMA)


@pytest.mark.parametrize("body", [b"", b"\x80\x04K\x01.", b"{}", b"\xff" * 64])
def test_a_body_that_is_not_an_arrow_stream_is_refused(body: bytes) -> None:
    with pytest.raises(SchemaError, match="must be an Arrow IPC stream"):
        read_stream(body, EpisodesHeader)


def test_a_stream_without_or_with_another_header_is_refused() -> None:
    _, batch = encode_episodes([episode([1])], "n")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(SchemaError, match="no header"):
        read_stream(sink.getvalue(), EpisodesHeader)
    with pytest.raises(SchemaError, match="must be a EpisodesHeader"):
        read_stream(write_stream(Ok(), batch), EpisodesHeader)


@pytest.mark.parametrize("lengths", [[40_000, 30_000, 0, 5], [9, 70_000], [1] * 3])
def test_the_pieces_of_a_commit_are_its_stream(lengths: list[int]) -> None:
    made = episode(lengths)
    every_other = made.trajectories[0]
    made.trajectories[0] = replace(every_other, token_ids=np.repeat(every_other.token_ids, 2)[::2])  # not contiguous
    pieces = episode_pieces([made, episode([3])], "n")
    whole = write_stream(*encode_episodes([made, episode([3])], "n"))
    assert b"".join(pieces) == whole.to_pybytes()
    assert (len(pieces) > 4) is (sum(lengths) > 65_536)


def test_a_writer_that_copies_its_buffers_gets_whole_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        episodes_module, "stream_pieces", lambda header, rows, instead=None: stream_pieces(header, rows)
    )
    made = [episode([70_000])]
    assert b"".join(episode_pieces(made, "n")) == write_stream(*encode_episodes(made, "n")).to_pybytes()


Change = Callable[[pa.Table], pa.Table]


def nullable(table: pa.Table) -> pa.Table:
    return pa.Table.from_arrays(table.columns, schema=pa.schema([f.with_nullable(True) for f in table.schema]))


def retyped(change: Callable[[pa.DataType], pa.DataType]) -> Change:
    def apply(table: pa.Table) -> pa.Table:
        schema = pa.schema([pa.field(f.name, change(f.type), f.nullable) for f in table.schema])
        return pa.Table.from_arrays([c.cast(f.type) for c, f in zip(table.columns, schema, strict=True)], schema=schema)

    return apply


def without_nulls_inside(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind.value_type, False)) if pa.types.is_list(kind) else kind


def large(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.large_list(kind.value_type)
    return pa.large_string() if pa.types.is_string(kind) else kind


SAME_VALUES: list[Change] = [
    nullable,
    lambda table: table.select(table.column_names[::-1]),
    retyped(without_nulls_inside),
    retyped(large),
]


@pytest.mark.parametrize("change", SAME_VALUES)
def test_a_table_that_says_the_same_otherwise_is_fitted_to_the_schema(change: Change) -> None:
    _, table = read_stream(write_stream(*encode_episodes([episode([2, 0, 3])], "n")), EpisodesHeader)
    changed = change(table)
    assert not changed.schema.equals(TRAJECTORY_SCHEMA)
    got = fitted(changed, TRAJECTORY_SCHEMA)
    check_schema(got, TRAJECTORY_SCHEMA, only=True)
    assert got.equals(table) and pa.concat_tables([got, table]).num_rows == 6


def test_a_table_that_fits_already_is_not_touched() -> None:
    _, table = read_stream(write_stream(*encode_episodes([episode([2])], "n")), EpisodesHeader)
    assert fitted(table, TRAJECTORY_SCHEMA) is table


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.append_column("more", pa.array([1])), "column=more is not one of a trajectory"),
        (lambda t: t.append_column("row", pa.array([1])), "column=row must come once"),
        (lambda t: t.drop_columns(["row"]), "column=row is missing"),
        (retyped(lambda k: pa.float64() if k == pa.float32() else k), "column reward=double must be float"),
        (
            lambda t: nullable(t).set_column(0, pa.field("episode_id", pa.string()), pa.nulls(1, pa.string())),
            "column episode_id=null must not be null",
        ),
    ],
)
def test_what_another_schema_says_else_is_refused(change: Change, problem: str) -> None:
    _, table = read_stream(write_stream(*encode_episodes([episode([2])], "n")), EpisodesHeader)
    with pytest.raises(SchemaError, match=problem):
        check_schema(fitted(change(table), TRAJECTORY_SCHEMA), TRAJECTORY_SCHEMA, only=True)
