"""From Arrow rows to what the machine knows, and back to the rows of a batch."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from astraflow.dataflow.machine.records import Batch, Entry, OpenGroup, Put, QueuedGroup
from astraflow.dataflow.storage.batches import batch_table
from astraflow.dataflow.storage.commits.rows import Known, episode_commits, row_facts
from astraflow.errors import SchemaError
from astraflow.testing.dataflow import episode, trajectory
from astraflow.types import Purpose, Trajectory
from astraflow.wire.codec import (
    TRAINING_SCHEMA,
    check_schema,
    write_stream,
)
from astraflow.wire.messages import EpisodesHeader
from committed import KNOWN, lease, parsed, sent, with_trajectories

PUT = Put(1, 64, 100)


def test_each_policy_of_an_episode_becomes_one_part() -> None:
    rows = (
        trajectory(0.5, 3, tokens=5), trajectory(0.25, 2, policy="verifier", tokens=3),
        trajectory(0.5, 4, branch=1, tokens=2),
    )  # fmt: skip
    header, table = sent(episode(lease(), "n", error="x: y"), with_trajectories(*rows, k=1))
    failed, good = episode_commits(header, row_facts(header, table, KNOWN), PUT)
    assert failed.error == "x: y" and failed.parts == []
    actor, verifier = good.parts
    assert (actor.rows, actor.min_versions, actor.max_version, actor.num_tokens) == ([0, 2], [3, 4], 4, 5)
    assert (actor.reward, actor.min_version, actor.put) == (0.5, 3, PUT.key)
    assert (verifier.policy, verifier.rows, verifier.reward) == ("verifier", [1], 0.25)


def test_unscored_and_not_a_number_are_the_same() -> None:
    header, table = sent(with_trajectories(trajectory(None)), with_trajectories(trajectory(float("nan")), k=1))
    commits = episode_commits(header, row_facts(header, table, KNOWN), PUT)
    assert [c.parts[0].reward for c in commits] == [None, None]


def test_rows_without_tokens_or_without_sampled_tokens_have_no_version() -> None:
    given = trajectory(1.0, tokens=1)
    empty = trajectory(1.0, tokens=0, branch=1)
    header, table = sent(with_trajectories(empty, given, trajectory(1.0, 2, branch=2)), with_trajectories(given, k=1))
    first, second = episode_commits(header, row_facts(header, table, KNOWN), PUT)
    assert first.parts[0].min_versions == [-1, -1, 2] and first.parts[0].min_version == 2
    assert second.parts[0].max_version == -1


def test_mixed_versions_within_a_trajectory_give_oldest_and_newest() -> None:
    mixed = trajectory(1.0, 3, tokens=4)
    mixed.versions[2] = 1
    header, table = sent(with_trajectories(mixed))
    (commit,) = episode_commits(header, row_facts(header, table, KNOWN), PUT)
    assert (commit.parts[0].min_version, commit.parts[0].max_version) == (1, 3)


def many_rows() -> tuple[EpisodesHeader, pa.Table]:
    """Rows of several lengths, with and without tokens or calls."""
    lengths = [0, 1, 5, 9, 2, 0, 3, 17, 8, 1, 0, 4]
    rows = [trajectory(1.0, i, branch=i, tokens=n) for i, n in enumerate(lengths)]
    rows[3].call_index[5:] = 2
    return sent(with_trajectories(*rows))


@pytest.mark.parametrize("size", [1, 3, 9, 11, 40])
def test_the_size_of_a_block_does_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    header, table = many_rows()
    whole = row_facts(header, table, KNOWN)
    monkeypatch.setattr("astraflow.dataflow.storage.commits.token_facts._BLOCK_TOKENS", size)
    assert row_facts(header, table, KNOWN) == whole
    broken = trajectory(1.0, tokens=6)
    broken.behavior_logprobs[4] = np.inf
    header, table = sent(
        *(with_trajectories(trajectory(1.0, tokens=4), k=k) for k in range(3)), with_trajectories(broken, k=3)
    )
    with pytest.raises(SchemaError, match=r"behavior_logprobs=inf must be a log probability, .* \(row 3\)"):
        row_facts(header, table, KNOWN)


def test_rows_may_come_as_several_record_batches_or_as_none() -> None:
    header, table = many_rows()
    parts = pa.concat_tables([table.slice(0, 4), table.slice(4, 0), table.slice(4)])
    assert row_facts(header, parts, KNOWN) == row_facts(header, table, KNOWN)
    header, table = sent(episode(lease(), "n", error="x: y"))
    none = pa.Table.from_batches([], schema=table.schema)
    assert row_facts(header, none, KNOWN) == row_facts(header, table, KNOWN) == ([], {})


def test_a_null_is_refused_and_its_row_named() -> None:
    header, table = sent(*(with_trajectories(trajectory(None), k=k) for k in range(3)))
    ids = pa.array([[1, 2, 3, 4], [1, None, 3, 4], [1, 2, 3, 4]], pa.list_(pa.int32()))
    at = table.schema.get_field_index("token_ids")
    with pytest.raises(SchemaError, match=r"column token_ids=null must not be null \(row 1\)"):
        row_facts(header, table.set_column(at, table.schema.field(at), ids), KNOWN)


def broken(column: str) -> tuple[EpisodesHeader, pa.Table]:
    row = trajectory(1.0)
    match column:
        case "versions":
            row.versions[2] = -1
        case "behavior_logprobs":
            row.behavior_logprobs[1] = np.nan
        case "policy":
            row = trajectory(1.0, policy="critic")
    header, table = sent(with_trajectories(row))
    match column:
        case "episode_id":
            header.episodes[0].num_rows = 2
        case "token_ids":
            index = table.schema.get_field_index(column)
            table = table.set_column(index, column, table.column(column).cast(pa.list_(pa.int64())))
    return header, table


@pytest.mark.parametrize("column", ["versions", "behavior_logprobs", "policy", "episode_id", "token_ids"])
def test_rows_that_break_the_contract_are_refused_by_column(column: str) -> None:
    header, table = broken(column)
    with pytest.raises(SchemaError, match=column):
        row_facts(header, table, KNOWN)


def test_an_episode_named_twice_is_refused() -> None:
    header, table = sent(with_trajectories(trajectory(1.0)), with_trajectories(trajectory(0.0)))
    with pytest.raises(SchemaError, match="once"):
        row_facts(header, table, KNOWN)


@pytest.mark.parametrize(
    "order", [[(2, 3), (0, 1), (2, 0), (1, 2), (0, 2)], [(n, k) for n in range(3) for k in range(40)]]
)
def test_a_batch_has_exactly_the_rows_of_its_groups_with_their_advantage_per_token(
    order: list[tuple[int, int]],
) -> None:
    bodies, parts = {}, {}
    for number in range(3):
        rows = [trajectory(1.0, marker=1000 * number + 10 * k, tokens=3 + k % 4) for k in range(40)]
        header, table = sent(*(with_trajectories(row, k=k) for k, row in enumerate(rows)))
        put = Put(1, 64 * number, 64)
        bodies[put.key] = (put, write_stream(header, table))
        for k, commit in enumerate(episode_commits(header, row_facts(header, table, KNOWN), put)):
            parts[number, k] = commit.parts[0]
    groups = [QueuedGroup(f"g{i}", 0.5 + i, 0, [Entry(parts[at], float(i), 0.0)]) for i, at in enumerate(order)]
    puts = {key: put for key, (put, _) in bodies.items()}
    table = batch_table(Batch(1, groups, {}), puts, lambda put: bodies[put.key][1])
    check_schema(table, TRAINING_SCHEMA)
    assert len(table) == len(order)
    for row in table.to_pylist():
        number, k = divmod(row["token_ids"][0], 1000)
        i = order.index((number, k // 10))
        assert row["token_ids"] == list(range(1000 * number + k, 1000 * number + k + 3 + (k // 10) % 4))
        assert row["advantages"] == [float(i) if sampled else 0.0 for sampled in row["loss_mask"]]
        assert row["weight"] == 0.5 + i and row["episode_id"] == f"train/0/5/{k // 10}"


@pytest.mark.parametrize(
    ("column", "token", "value", "problem"),
    [
        ("versions", 0, 1, r"versions=1 must be -1 where loss_mask is false \(row 1\)"),
        ("versions", 2, -1, r"versions=-1 must be >= 0 where loss_mask is true \(row 1\)"),
        ("versions", 3, 51, r"versions=51 must be at most 50, the newest version of actor \(row 1\)"),
        ("call_index", 0, 5, r"call_index=5 must be -1 where loss_mask is false \(row 1\)"),
    ],
)
def test_versions_are_those_that_sampled(column: str, token: int, value: int, problem: str) -> None:
    row = trajectory(1.0, 3, tokens=6)
    getattr(row, column)[token] = value
    header, table = sent(with_trajectories(trajectory(1.0)), with_trajectories(row, k=1))
    with pytest.raises(SchemaError, match="column " + problem):
        row_facts(header, table, KNOWN)


def test_each_policy_has_a_newest_version_of_its_own() -> None:
    rows = [trajectory(1.0, 2), trajectory(1.0, 5, policy="verifier")]
    header, table = sent(with_trajectories(*rows))
    assert len(row_facts(header, table, Known({"actor": 2, "verifier": 5})).rows) == 2
    with pytest.raises(SchemaError, match=r"versions=5 must be at most 4, the newest version of verifier \(row 1\)"):
        row_facts(header, table, Known({"actor": 9, "verifier": 4}))


def per_call(rewards: tuple[float, ...], calls: int, branch: int = 0, policy: str = "actor") -> Trajectory:
    row = trajectory(1.0, tokens=1 + calls, branch=branch, policy=policy)
    row.call_index[1:] = np.arange(calls)
    return replace(row, rewards_per_call=rewards)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([per_call((0.5,), 1), per_call((), 3, branch=1)], r"=\[\] must be the same in rows 0 and 1"),
        ([per_call((), 1), per_call((0.5,), 1, branch=1)], r"=\[0.5\] must be the same in rows 0 and 1"),
        ([per_call((0.5,), 1), per_call((0.5,), 2, branch=1)], r"=1 must be one per call \(row 1 has 2 calls\)"),
        ([per_call((0.5, 1.0), 2), per_call((0.5, 0.0), 1, branch=1)], ".* must be the same in rows 0 and 1"),
    ],
)
def test_rewards_per_call_are_those_of_all_branches(rows: list[Trajectory], problem: str) -> None:
    header, table = sent(with_trajectories(*rows))
    with pytest.raises(SchemaError, match="column rewards_per_call" + problem):
        row_facts(header, table, KNOWN)


def test_each_policy_and_episode_has_rewards_per_call_of_its_own() -> None:
    good = [
        per_call((0.5, 1.0), 2), per_call((0.25,), 1, policy="verifier"), per_call((0.5, 1.0), 1, branch=1)
    ]  # fmt: skip
    header, table = sent(with_trajectories(*good), with_trajectories(per_call((), 3), k=1))
    first, second = episode_commits(header, row_facts(header, table, KNOWN), PUT)
    assert [(p.rewards_per_call, p.num_calls) for p in first.parts] == [((0.5, 1.0), 2), ((0.25,), 1)]
    assert [(p.rewards_per_call, p.num_calls) for p in second.parts] == [((), 3)]


def test_tokens_that_no_model_has_and_samples_without_a_context_are_refused() -> None:
    negative, bare = trajectory(1.0), trajectory(1.0)
    negative.token_ids[2] = -5
    bare.loss_mask[0], bare.versions[0], bare.call_index[0] = True, 0, 0
    for row, problem in ((negative, r"token_ids=-5 must be >= 0 \(row 1\)"), (bare, r"loss_mask=True .*\(row 1\)")):
        header, table = sent(with_trajectories(trajectory(1.0)), with_trajectories(row, k=1))
        with pytest.raises(SchemaError, match="column " + problem):
            row_facts(header, table, KNOWN)
    fork = replace(bare, branch=1, parent_branch=0, fork_at=2)
    header, table = sent(with_trajectories(trajectory(1.0), fork))
    assert row_facts(header, table, KNOWN).rows[1][1] == 4


def played(group_id: str, source: str, row: int, epoch: int, purpose: Purpose = "train") -> OpenGroup:
    return OpenGroup(group_id, source, row, epoch, 1, purpose, [1] * 4, [0] * 4, ["n"] * 4, [None] * 4, 4)


LEASED = KNOWN._replace(groups={"train/0/5": played("train/0/5", "train", 5, 0)})


@pytest.mark.parametrize("name", ["episode_id", "attempt", "group_id", "source", "row", "epoch"])
def test_rows_are_those_of_the_lease(name: str) -> None:
    header, table = sent(*(with_trajectories(trajectory(1.0), k=k) for k in range(3)))
    assert len(row_facts(header, table, LEASED).rows) == 3
    at, values = table.schema.get_field_index(name), table.column(name).to_pylist()
    values[1] = values[1] + 1 if isinstance(values[1], int) else "other/0/1"
    changed = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
    with pytest.raises(SchemaError, match=rf"column {name}={values[1]} must .*\(row 1\)"):
        row_facts(header, changed, LEASED)


def test_what_is_not_played_any_more_may_say_what_it_likes_but_hides_nothing() -> None:
    late = replace(with_trajectories(trajectory(1.0)), episode_id="train/0/9/0")  # says row 5
    header, table = sent(late, with_trajectories(trajectory(1.0)))
    assert len(row_facts(header, table, LEASED).rows) == 2
    at = table.schema.get_field_index("row")
    changed = table.set_column(at, table.schema.field(at), pa.array([5, 6], pa.int64()))
    with pytest.raises(SchemaError, match=r"column row=6 must be that of its lease, 5 \(row 1\)"):
        row_facts(header, changed, LEASED)


@pytest.mark.parametrize("counts", [(1, -1, 1), (2, 1, 1), (1, 0, 1)])
def test_headers_count_the_rows(counts: tuple[int, ...]) -> None:
    header, table = sent(*(with_trajectories(trajectory(1.0), k=k) for k in range(3)))
    if counts[1] < 0:
        table = table.slice(0, 1)
    for episode_header, count in zip(header.episodes, counts, strict=True):
        episode_header.num_rows = count
    with pytest.raises(SchemaError, match=r"header.num_rows=-1 must be >= 0|column episode_id=3 rows must follow"):
        row_facts(header, table, KNOWN)


def test_an_evaluation_is_of_its_version_or_a_newer_one() -> None:
    group_id = "eval/3/held/5"
    known = KNOWN._replace(groups={group_id: played(group_id, "held", 5, 0, "eval")})
    rows = (trajectory(None, 3), trajectory(None, 2, policy="verifier"))
    task = replace(lease().task, source="held")
    made = replace(with_trajectories(*rows), episode_id=f"{group_id}/0", task=task)
    header, table = sent(with_trajectories(trajectory(1.0, 0)), made)
    with pytest.raises(SchemaError, match=r"versions=2 must be at least 3, as min_versions .*\(row 2\)"):
        row_facts(header, table, known)
    header, table = sent(with_trajectories(trajectory(1.0, 0)), replace(made, trajectories=list(rows[:1])))
    assert len(row_facts(header, table, known).rows) == 2


def test_a_column_that_nobody_knows_is_refused_by_name() -> None:
    header, table = sent(with_trajectories(trajectory(1.0)))
    more = table.append_column("advantages", pa.array([1.0]))
    with pytest.raises(SchemaError, match="column=advantages is not one of a trajectory"):
        row_facts(header, more, KNOWN)


@pytest.mark.parametrize("value", [0.02, 5.0, 3e38, -3e38, -10_001.0, float("nan"), float("-inf")])
def test_what_cannot_be_a_log_probability_is_refused(value: float) -> None:
    broken = trajectory(1.0, branch=1)
    broken.behavior_logprobs[2] = value
    header, table = sent(with_trajectories(trajectory(1.0), broken))
    with pytest.raises(SchemaError, match=r"behavior_logprobs=.* must be a log probability, -10000 to 0 \(row 1\)"):
        row_facts(header, table, KNOWN)


@pytest.mark.parametrize("value", [0.0, 1e-3, -9999.0])
def test_log_probabilities_may_be_rounded_and_very_small(value: float) -> None:
    row = trajectory(1.0)
    row.behavior_logprobs[2] = value
    row_facts(*sent(with_trajectories(row)), KNOWN)


@pytest.mark.parametrize("rewards", [(1.0, 0.5), (None, 0.5), (1.0, None), (float("nan"), 0.0)])
def test_rows_of_one_episode_and_policy_have_one_reward(rewards: tuple[float | None, float | None]) -> None:
    rows = [trajectory(rewards[0]), trajectory(0.25, policy="verifier"), trajectory(rewards[1], branch=1)]
    header, table = sent(with_trajectories(trajectory(3.0)), with_trajectories(*rows, k=1))
    with pytest.raises(SchemaError, match=r"reward=.* must be the same in rows 1 and 3, of one episode and policy"):
        row_facts(header, table, KNOWN)


def test_unscored_rows_of_one_episode_agree_however_they_say_it() -> None:
    rows = [trajectory(None), trajectory(float("nan"), branch=1)]
    (commit,) = episode_commits(*parsed(with_trajectories(*rows)), PUT)
    assert commit.parts[0].reward is None


def test_an_infinite_reward_is_refused() -> None:
    header, table = sent(with_trajectories(trajectory(1.0)), with_trajectories(trajectory(float("-inf")), k=1))
    with pytest.raises(SchemaError, match=r"column reward=-inf must be finite \(row 1\)"):
        row_facts(header, table, KNOWN)


@pytest.mark.parametrize("value", [1.7e308, -3.5e38])
def test_metrics_that_32_bits_cannot_hold_are_refused(value: float) -> None:
    with pytest.raises(SchemaError, match=r"Expected `float` [<>]= -?3.4.*metrics"):
        sent(replace(with_trajectories(trajectory(1.0)), metrics={"success": value}))


def test_two_rows_of_one_episode_and_none_of_another_go_to_the_right_ones() -> None:
    rows = [trajectory(1.0), trajectory(1.0, branch=1)]
    failed = episode(lease(1), "n", error="x: y")
    first, second = episode_commits(*parsed(with_trajectories(*rows), failed), PUT)
    assert (first.parts[0].rows, second.parts) == ([0, 1], [])
    second, first = episode_commits(*parsed(failed, with_trajectories(*rows)), PUT)
    assert (first.parts[0].rows, second.parts) == ([0, 1], [])
