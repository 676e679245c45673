"""Branches of the rows of an episode: trees, refused where they are none."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from astraflow.dataflow.storage.commits.rows import row_facts
from astraflow.errors import SchemaError
from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.testing.dataflow import trajectory
from astraflow.types import Trajectory
from astraflow.wire.codec import list_lengths
from committed import KNOWN, sent, with_trajectories


def branch(number: int, parent: int = -1, fork_at: int = 0, policy: str = "actor") -> Trajectory:
    """Four tokens of its own."""
    return replace(trajectory(1.0, policy=policy), branch=number, parent_branch=parent, fork_at=fork_at)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([branch(-2)], r"branch=-2 must be >= 0 \(row 1\)"),
        ([branch(0), branch(1, -2)], r"parent_branch=-2 must be -1 \(none\) or a branch \(row 2\)"),
        ([branch(0), branch(1, 0, -1)], r"fork_at=-1 must be >= 0.* \(row 2\)"),
        ([branch(0, -1, 3)], r"fork_at=3 must be .* 0 without a parent \(row 1\)"),
        ([branch(0), branch(0)], r"branch=0 must be named once by train/0/5/1 for actor \(row 2\)"),
        ([branch(0, 7, 5)], r"parent_branch=7 is not in the episode \(row 1\)"),
        ([branch(0), branch(1, 0, policy="verifier")], r"parent_branch=0 is not in the episode \(row 2\)"),
        ([branch(0, 0, 1)], r"parent_branch=0 leads back to its own branch \(row 1\)"),
        ([branch(0, 2), branch(1, 0), branch(2, 1)], r"parent_branch=2 leads back to its own branch \(row 1\)"),
        ([branch(0), branch(1, 0, 5)], r"fork_at=5 is behind its parent's 4 tokens \(row 2\)"),
        ([branch(0), branch(1, 0, 2), branch(2, 1, 7)], r"fork_at=7 is behind its parent's 6 tokens \(row 3\)"),
    ],
)
def test_branches_that_are_no_tree_are_refused(rows: list[Trajectory], problem: str) -> None:
    header, table = sent(with_trajectories(trajectory(1.0)), with_trajectories(*rows, k=1))
    with pytest.raises(SchemaError, match="column " + problem):
        row_facts(header, table, KNOWN)


def test_trees_may_come_in_any_order_and_each_policy_has_its_own() -> None:
    rows = [branch(2, 1, 6), branch(1, 0, 2), branch(0), branch(9), branch(0, policy="verifier"), branch(3, 2, 10)]
    header, table = sent(with_trajectories(*rows), with_trajectories(branch(0), k=1))
    assert len(row_facts(header, table, KNOWN).rows) == 7
    rows_from_table(training_rows(table))  # the trainer agrees


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 9)), min_size=1, max_size=5))
def test_the_door_and_the_trainer_agree_on_trees(made: list[tuple[int, int, int]]) -> None:
    header, table = sent(with_trajectories(*(branch(*x) for x in made)))
    try:
        row_facts(header, table, KNOWN)
    except SchemaError:
        return
    assert pack_rows(rows_from_table(training_rows(table)), 64)


def training_rows(table: pa.Table) -> pa.Table:
    """With the columns that a batch adds."""
    ones = pa.array([[1.0] * n for n in list_lengths(table.column("token_ids"))], pa.list_(pa.float32()))
    return table.append_column("advantages", ones).append_column("weight", pa.array([1.0] * len(table), pa.float32()))
