"""Tokens of stored rows, credit spread over tokens, and calls counted at the door."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.machine.records import Put
from astraflow.dataflow.storage.commits.rows import Known, episode_commits, row_facts
from astraflow.dataflow.storage.tokens import TokenReader, token_advantages
from astraflow.errors import DataflowError, SchemaError
from astraflow.testing.dataflow import episode, trajectory
from astraflow.types import EpisodeLease, Task, Trajectory
from astraflow.wire.codec import read_stream, write_stream
from astraflow.wire.episodes import encode_episodes
from astraflow.wire.messages import EpisodesHeader

LEASE = EpisodeLease(
    episode_id="train/0/5/0", group_id="train/0/5", attempt=1, task=Task("train", 5, 0, {}), timeout_s=1.0,
    min_versions={}, sampling={},
)  # fmt: skip


def body(*rows: Trajectory) -> bytes:
    return bytes(memoryview(write_stream(*encode_episodes([episode(LEASE, "n", trajectories=list(rows))], "n"))))


def by_calls(index: Sequence[int], rewards_per_call: tuple[float, ...] = ()) -> Trajectory:
    made = trajectory(1.0, tokens=len(index))
    made.call_index[:] = index
    made.loss_mask[:] = made.call_index >= 0
    made.versions[:] = np.where(made.loss_mask, 0, -1)
    return Trajectory(
        policy="actor", branch=0, parent_branch=-1, fork_at=0, token_ids=made.token_ids, loss_mask=made.loss_mask,
        behavior_logprobs=made.behavior_logprobs, versions=made.versions, call_index=made.call_index, reward=1.0,
        rewards_per_call=rewards_per_call,
    )  # fmt: skip


def test_tokens_are_those_of_the_rows_asked_for_whichever_put_was_read_before() -> None:
    stored = {1: body(trajectory(1.0, tokens=3), trajectory(1.0, branch=1, tokens=2, marker=50)), 2: body(
        trajectory(0.0, 4, tokens=4, marker=90))}  # fmt: skip
    reads: list[int] = []

    def read(put: Put) -> pa.Buffer:
        reads.append(put.segment)
        return pa.py_buffer(stored[put.segment])

    reader = TokenReader(read)
    first, second = Put(1, 0, len(stored[1])), Put(2, 0, len(stored[2]))
    assert [t.token_ids.tolist() for t in reader(first, [1, 0])] == [[50, 51], [7, 8, 9]]
    assert [t.token_ids.tolist() for t in reader(first, [0])] == [[7, 8, 9]]
    (other,) = reader(second, [0])
    assert other.token_ids.tolist() == [90, 91, 92, 93] and other.versions.tolist() == [-1, 4, 4, 4]
    assert other.loss_mask.tolist() == [False, True, True, True]
    assert reads == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        other.token_ids[0] = 0


ROW = st.tuples(st.booleans(), st.lists(st.integers(-1, 2), max_size=5), st.floats(-2, 2, width=32))


@settings(max_examples=50)
@given(st.lists(ROW, min_size=1, max_size=6))
def test_a_sampled_token_gets_the_advantage_of_its_call_or_episode(
    rows: list[tuple[bool, list[int], float]],
) -> None:
    index = np.array([i for _, calls, _ in rows for i in calls], np.int16)
    of_calls = [(a, a + 1, a + 2) if per_call else () for per_call, _, a in rows]
    expected = [0.0 if i < 0 else np.float32(a + i if per_call else a) for per_call, calls, a in rows for i in calls]
    given = token_advantages(
        np.array([a for *_, a in rows], np.float32), of_calls, np.array([len(c) for _, c, _ in rows]), index >= 0,
        lambda: index,
    )  # fmt: skip
    assert given.dtype == np.float32 and given.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_token_of_a_call_without_an_advantage_is_an_error() -> None:
    with pytest.raises(DataflowError, match=r"row 1 call_index=2 is a call without an advantage \(2 are known\)"):
        token_advantages(
            np.zeros(2, np.float32), [(), (1.0, 0.5)], np.array([1, 3]), np.ones(4, bool),
            lambda: np.array([0, 0, 1, 2], np.int16),
        )  # fmt: skip


def calls_of(*rows: Trajectory) -> int:
    header, table = read_stream(body(*rows), EpisodesHeader)
    (commit,) = episode_commits(header, row_facts(header, table, Known({"actor": 4})), Put(1, 0, 1))
    return commit.parts[0].num_calls


def test_calls_are_counted_over_branches_and_by_their_rewards() -> None:
    assert calls_of(by_calls([-1, 0, 0])) == 1
    assert calls_of(by_calls([-1, 0, -1, 1]), trajectory(1.0, branch=1)) == 2
    assert calls_of(by_calls([-1, 0, -1, 1], (0.5, 0.0, 1.0))) == 3  # the last call sampled nothing
    assert calls_of(by_calls([-1, -1])) == 0


def test_fewer_rewards_than_calls_and_tokens_of_no_call_are_refused_at_the_door() -> None:
    with pytest.raises(SchemaError, match=r"column rewards_per_call=1 must be one per call \(row 0 has 2 calls\)"):
        calls_of(by_calls([-1, 0, 1], (0.5,)))
    lost = by_calls([-1, 0, 1, 1])
    lost.call_index[2] = -1
    with pytest.raises(SchemaError, match="column call_index=-1 must be >= 0 where loss_mask is true"):
        calls_of(lost)
