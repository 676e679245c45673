"""Rows of a batch: shares of data-parallel ranks, and columns that stages added."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.machine.records import Added, Batch, Entry, Part, Put, QueuedGroup
from astraflow.dataflow.storage.balance import partition, share
from astraflow.dataflow.storage.batches import BatchRows, batch_rows, batch_table, rows_table
from astraflow.dataflow.storage.commits.rows import Known, episode_commits, row_facts
from astraflow.testing.dataflow import episode, trajectory
from astraflow.types import EpisodeLease, Task
from astraflow.wire.codec import TRAINING_SCHEMA, read_stream, write_stream
from astraflow.wire.episodes import encode_episodes
from astraflow.wire.messages import EpisodesHeader, Ok


class Store:
    """Bodies of puts, as the segments hold them."""

    def __init__(self) -> None:
        self.puts: dict[int, Put] = {}
        self._bodies: dict[int, pa.Buffer] = {}

    def add(self, body: pa.Buffer) -> Put:
        put = Put(1, 64 * (1 + len(self.puts)), len(body))
        self.puts[put.key], self._bodies[put.key] = put, body
        return put

    def read(self, put: Put) -> pa.Buffer:
        return self._bodies[put.key]

    def episodes(self, lengths: list[list[int]], group: int = 0) -> list[Part]:
        """One put: per episode the tokens of its branches, which begin with a number of their own."""
        played = []
        for k, branches in enumerate(lengths):
            lease = EpisodeLease(
                episode_id=f"train/0/{group}/{k}", group_id=f"train/0/{group}", attempt=1,
                task=Task("train", group, 0, {}), timeout_s=1.0, min_versions={}, sampling={},
            )  # fmt: skip
            rows = [
                trajectory(1.0, branch=i, tokens=n, marker=10_000 * group + 100 * k + 10 * i)
                for i, n in enumerate(branches)
            ]
            played.append(episode(lease, "n", trajectories=rows))
        header, table = read_stream(write_stream(*encode_episodes(played, "n")), EpisodesHeader)
        put = self.add(write_stream(header, table))
        return [c.parts[0] for c in episode_commits(header, row_facts(header, table, Known({"actor": 0})), put)]

    def columns(self, **columns: pa.Array) -> int:
        """What a stage added; the key of the put."""
        return self.add(write_stream(Ok(), pa.table(columns))).key


def batch_of(parts: list[Part], added: list[list[Added]] | None = None) -> Batch:
    columns = added or [[] for _ in parts]
    entries = [Entry(p, float(i), 1.0, (), a, i) for i, (p, a) in enumerate(zip(parts, columns, strict=True))]
    return Batch(1, [QueuedGroup("train/0/0", 1.0, 0, entries)], {})


def test_more_ranks_than_items_get_one_each_or_nothing() -> None:
    assert partition([3, 5, 4], 5) == [[1], [2], [0], [], []]
    assert partition([7], 3) == [[0], [], []]
    assert partition([], 3) == [[], [], []]
    assert sum(map(len, partition([1] * 64, 4096))) == 64


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_item_is_in_exactly_one_part(sizes: list[int], ranks: int) -> None:
    parts = partition(sizes, ranks)
    assert len(parts) == ranks and sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    assert partition(sizes, ranks) == parts
    loads = [sum(sizes[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0), "worse than taking turns with the largest"


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_log_normal_length_are_balanced(seed: int) -> None:
    sizes = (np.random.default_rng(seed).lognormal(6, 1, 512).astype(int) + 1).tolist()
    loads = [sum(sizes[i] for i in part) for part in partition(sizes, 8)]
    assert max(loads) / (sum(loads) / 8) < 1.02


def test_equal_numbers_are_parted_as_the_method_says() -> None:
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in part) for part in partition([8, 7, 6, 5, 4], 2)) == [14, 16]


def test_branches_of_an_episode_stay_together() -> None:
    owners = np.array([0, 0, 0, 1, 1, 2, 3])
    lengths = np.array([5, 5, 5, 9, 9, 12, 14])
    shares = [share(lengths, owners, rank, 2) for rank in range(2)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(7))
    assert not set(owners[shares[0]]) & set(owners[shares[1]])
    assert sorted(int(lengths[rows].sum()) for rows in shares) == [29, 30], "all tokens of an episode count"


def test_shares_of_rows_of_log_normal_length_are_balanced() -> None:
    chance = np.random.default_rng(0)
    owners = np.sort(chance.integers(0, 256, 700))
    lengths = chance.lognormal(6, 1, 700).astype(int) + 1
    loads = [int(lengths[share(lengths, owners, rank, 8)].sum()) for rank in range(8)]
    assert sum(loads) == lengths.sum() and max(loads) / (sum(loads) / 8) < 1.02


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_the_shares_of_all_ranks_are_the_batch(ranks: int) -> None:
    store = Store()
    parts = store.episodes([[3, 4], [9], [5]]) + store.episodes([[7], [2, 2, 2], [6]], group=1)
    batch = batch_of(parts)
    whole = batch_table(batch, store.puts, store.read)
    tables = [batch_table(batch, store.puts, store.read, rank, ranks) for rank in range(ranks)]
    assert all(t.schema == TRAINING_SCHEMA for t in tables)
    together = pa.concat_tables(tables).to_pylist()
    by_first = lambda row: row["token_ids"][0]  # noqa: E731
    assert sorted(together, key=by_first) == sorted(whole.to_pylist(), key=by_first)


@pytest.mark.parametrize("ranks", [1, 2])
def test_branches_of_an_episode_weigh_each_or_once(ranks: int) -> None:
    store = Store()
    batch = batch_of(store.episodes([[3, 4], [9], [5, 2, 2, 2]]))
    batch.groups[0] = msgspec.structs.replace(batch.groups[0], weight=2.0)
    for branches, wanted in (("each", {2: 2.0, 1: 2.0, 4: 2.0}), ("once", {2: 1.0, 1: 2.0, 4: 0.5})):
        found: dict[str, list[float]] = {}
        for rank in range(ranks):
            for row in batch_table(batch, store.puts, store.read, rank, ranks, branches).to_pylist():
                found.setdefault(row["episode_id"], []).append(row["weight"])
        assert {len(weights): weights for weights in found.values()} == {n: [w] * n for n, w in wanted.items()}


def test_where_rows_lie_travels_as_json() -> None:
    store = Store()
    batch = batch_of(store.episodes([[3, 4], [9]]))
    rows = batch_rows(batch, store.puts, 1, 2)
    again = msgspec.json.decode(msgspec.json.encode(rows), type=BatchRows)
    assert rows_table(again, store.read).equals(batch_table(batch, store.puts, store.read, 1, 2))


def added_of(store: Store, parts: list[Part], order: list[int], **columns: Any) -> list[list[Added]]:
    """A stage's columns for these entries, its rows in `order` of the entries, in one put."""
    key = store.columns(**columns)
    found: dict[int, Added] = {}
    row = 0
    for i in order:
        found[i] = Added("judge", key, list(range(row, row + len(parts[i].rows))))
        row += len(parts[i].rows)
    return [[found[i]] if i in found else [] for i in range(len(parts))]


def test_added_columns_are_joined_to_their_rows_in_whatever_order_they_came() -> None:
    store = Store()
    parts = store.episodes([[3], [4, 2], [5]])
    values = pa.array([30.0, 10.0, 11.0, 0.0], pa.float32())  # of entries 2, 1 (two rows), 0
    per_token = pa.array([[3.0] * 5, [1.0] * 4, [2.0] * 2, [0.0] * 3], pa.list_(pa.float32()))
    added = added_of(store, parts, [2, 1, 0], value=values, ref_logprobs=per_token)
    batch = batch_of([parts[1], parts[2], parts[0]], [added[1], added[2], added[0]])
    table = batch_table(batch, store.puts, store.read)
    assert table.schema.names == [*TRAINING_SCHEMA.names, "value", "ref_logprobs"]
    rows = {row["token_ids"][0]: (row["value"], row["ref_logprobs"]) for row in table.to_pylist()}
    assert rows == {0: (0.0, [0.0] * 3), 100: (10.0, [1.0] * 4), 110: (11.0, [2.0] * 2), 200: (30.0, [3.0] * 5)}
    mine = batch_table(batch, store.puts, store.read, 0, 2).to_pylist()
    assert all(rows[row["token_ids"][0]] == (row["value"], row["ref_logprobs"]) for row in mine)


def test_a_column_is_null_where_an_entry_lacks_it_and_replaces_one_of_its_name() -> None:
    store = Store()
    parts = store.episodes([[3], [4]])
    added = added_of(store, parts, [1], reward=pa.array([0.25], pa.float32()), value=pa.array([7.0], pa.float32()))
    rows = batch_table(batch_of(parts, added), store.puts, store.read).to_pylist()
    assert [(row["value"], row["reward"]) for row in rows] == [(None, 1.0), (7.0, 0.25)]
