"""From Arrow columns to the machine: the rows of a commit are checked, and what it must know of them read off.

No per-token Python, and as few passes over the tokens as possible: this runs in the event loop of the service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.records import EpisodeCommit, OpenGroup, Part, Put
from astraflow.dataflow.storage.commits.branches import check_branches
from astraflow.dataflow.storage.commits.owners import check_owners, check_sizes
from astraflow.dataflow.storage.commits.token_facts import token_facts
from astraflow.errors import SchemaError
from astraflow.wire.codec import TRAJECTORY_SCHEMA, check_schema, flat_values, list_lengths
from astraflow.wire.messages import EpisodesHeader

_ERROR_CHARS = 4096  # of what went wrong; it is journaled

# policy, sampled, oldest, newest, calls, reward, scored, truncated
_Row = tuple[str, int, int, int, int, float, bool, bool]


class RowFacts(NamedTuple):
    """What the machine must know of the rows of one request, in their order."""

    rows: list[_Row]
    rewards_per_call: dict[int, tuple[float, ...]]  # by row; absent: none given


class Known(NamedTuple):
    """What the run knows of what may come."""

    newest: Mapping[str, int]  # policy -> newest weight version that anybody can have
    groups: Mapping[str, OpenGroup] = {}  # those whose episodes are played
    max_tokens: int = 1 << 18  # of one episode
    floor: Callable[[str, int], int] = lambda policy, round_: round_  # oldest version of a policy in a round


def row_facts(header: EpisodesHeader, table: pa.Table, known: Known) -> RowFacts:
    """Check the rows of one request (after `wire.codec.fitted`) and read off what matters.

    Raises: SchemaError: columns of another type or length, rows that do not fit the header, an unknown policy, what no
    node that keeps the rules of docs/protocol.md sends.
    """
    rows = _one_batch(table)
    check_schema(rows, TRAJECTORY_SCHEMA, only=True)
    names, rounds = check_owners(header, rows, known.newest, known.groups)
    lengths = list_lengths(rows.column("token_ids"))
    check_sizes(header, rows, lengths, known.max_tokens)
    counts, oldest, newest, calls, first_sampled = token_facts(rows, lengths)
    _check_versions(names, newest, known.newest)
    _check_floors(names, oldest, rounds, known.floor)
    check_branches(header, rows, names, lengths)
    _check_context(rows, first_sampled)
    firsts = _first_rows(header, names)
    rewards_per_call = _rewards_per_call(rows)
    if rewards_per_call:
        _check_per_call(firsts, calls.tolist(), rewards_per_call)
    rewards = rows.column("reward").to_numpy(zero_copy_only=False)  # null becomes NaN
    _check_rewards(firsts, rewards)
    scored = np.isfinite(rewards)
    truncated = rows.column("truncated").to_pylist()
    columns = [x.tolist() for x in (counts, oldest, newest, calls, rewards, scored)]
    return RowFacts(list(zip(names, *columns, truncated, strict=True)), rewards_per_call)


def _check_versions(names: list[str], newest: np.ndarray, known: Mapping[str, int]) -> None:
    """Nothing was sampled with a version that does not exist: it would count as fresh for ever."""
    if not len(newest) or newest.max() <= min(known.values()):
        return
    row = next((i for i, name in enumerate(names) if newest[i] > known[name]), None)
    if row is not None:
        raise SchemaError(
            "column versions", int(newest[row]), f"must be at most {known[names[row]]}, the newest version of "
            f"{names[row]} (row {row})", "send the version that sampled each token, as the trainer published it",
        )  # fmt: skip


def _check_floors(
    names: list[str], oldest: np.ndarray, rounds: Mapping[int, int], floor_of: Callable[[str, int], int]
) -> None:
    """An evaluation round is of its version or newer ones. What is too old to be trained on is dropped and counted."""
    for row, version in rounds.items():
        floor = floor_of(names[row], version)
        if 0 <= oldest[row] < floor:
            raise SchemaError(
                "column versions", int(oldest[row]), f"must be at least {floor}, as min_versions of its lease says "
                f"(row {row})", "fetch the newest weights before an episode starts",
            )  # fmt: skip


def _check_context(rows: pa.RecordBatch, first_sampled: np.ndarray) -> None:
    """What was sampled has something before it."""
    if first_sampled.any():
        wrong = (first_sampled > 0) & (rows.column("fork_at").to_numpy() == 0)
        if wrong.any():
            raise SchemaError(
                "column loss_mask", True, f"marks a first token that has no context (row {int(np.argmax(wrong))})",
                "sample after a prompt, and send it",
            )  # fmt: skip


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    """The rows without chunks; they are copied when they came as several batches."""
    batches = table.to_batches()
    if len(batches) > 1:
        batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in table.schema.types], schema=table.schema)


def episode_commits(header: EpisodesHeader, facts: RowFacts, put: Put | None) -> list[EpisodeCommit]:
    """Episodes of one request as the machine sees them; `put`: where their rows lie (None: there are none)."""
    commits, start, key = [], 0, put.key if put is not None else 0
    for episode in header.episodes:
        end = start + episode.num_rows
        engines = {**header.engines, **episode.engines} if episode.engines else header.engines
        parts = _parts(facts, start, end, key, engines)
        error = episode.error if episode.error is None else episode.error[:_ERROR_CHARS]
        commits.append(EpisodeCommit(episode.episode_id, episode.attempt, error, episode.metrics, parts, episode.code))
        start = end
    return commits


def _parts(facts: RowFacts, start: int, end: int, key: int, engines: Mapping[str, str]) -> list[Part]:
    rows, calls = facts
    if end - start == 1:  # nearly every episode has one row
        policy, sampled, oldest, newest, num_calls, reward, scored, truncated = rows[start]
        given = calls.get(start, ()) if calls else ()
        score = reward if scored else None
        most = max(num_calls, len(given))
        engine = engines.get(policy, "")
        return [Part(policy, key, [start], [oldest], newest, sampled, int(truncated), score, given, most, engine)]
    by_policy: dict[str, list[int]] = {}
    for i in range(start, end):
        by_policy.setdefault(rows[i][0], []).append(i)
    return [_part(facts, policy, numbers, key, engines.get(policy, "")) for policy, numbers in by_policy.items()]


def _part(facts: RowFacts, policy: str, numbers: list[int], key: int, engine: str) -> Part:
    rows, calls = facts
    given = calls.get(numbers[0], ())
    return Part(
        policy=policy,
        put=key,
        rows=numbers,
        min_versions=[rows[i][2] for i in numbers],
        max_version=max(rows[i][3] for i in numbers),
        num_tokens=sum(rows[i][1] for i in numbers),
        num_truncated=sum(rows[i][7] for i in numbers),
        reward=rows[numbers[0]][5] if rows[numbers[0]][6] else None,  # as of all of them
        rewards_per_call=given,
        num_calls=max(len(given), *(rows[i][4] for i in numbers)),
        engine=engine,
    )


def _rewards_per_call(rows: pa.RecordBatch) -> dict[int, tuple[float, ...]]:
    column = rows.column("rewards_per_call")
    if not len(column.values):
        return {}
    lengths, values = list_lengths(column), flat_values(column)
    ends = np.cumsum(lengths)
    if not np.isfinite(values).all():
        row = int(np.searchsorted(ends, np.argmin(np.isfinite(values)), "right"))
        raise SchemaError(
            "column rewards_per_call", values[ends[row] - lengths[row] : ends[row]].tolist(),
            f"must be finite (row {row})", "give a reward for each call, or none",
        )  # fmt: skip
    given, numbers = np.flatnonzero(lengths).tolist(), values.tolist()
    return {row: tuple(numbers[ends[row] - lengths[row] : ends[row]]) for row in given}


def _first_rows(header: EpisodesHeader, names: list[str]) -> list[int]:
    """Of each row: the first one of its episode and policy."""
    if max((e.num_rows for e in header.episodes), default=0) <= 1:  # nearly always
        return list(range(len(names)))
    found: list[int] = []
    for episode in header.episodes:
        start, first = len(found), dict[str, int]()
        found += [first.setdefault(names[row], row) for row in range(start, start + episode.num_rows)]
    return found


def _check_rewards(firsts: list[int], rewards: np.ndarray) -> None:
    """The reward is that of an episode and policy: the same on all its rows. Not a number is unscored."""
    if np.isinf(rewards).any():
        row = int(np.argmax(np.isinf(rewards)))
        raise SchemaError("column reward", float(rewards[row]), f"must be finite (row {row})", "null is unscored")
    others = rewards[firsts]
    wrong = (rewards != others) & ~(np.isnan(rewards) & np.isnan(others))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise SchemaError(
            "column reward", float(rewards[row]), f"must be the same in rows {firsts[row]} and {row}, of one episode "
            "and policy", "give every branch the reward of its episode",
        )  # fmt: skip


def _check_per_call(firsts: list[int], calls: list[int], given: dict[int, tuple[float, ...]]) -> None:
    """Rewards per call are those of an episode and policy: the same on all its rows, one for each call or more."""
    for row, other in enumerate(firsts):
        own = given.get(row, ())
        if own != given.get(other, ()):
            raise SchemaError(
                "column rewards_per_call", list(own), f"must be the same in rows {other} and {row}, of one episode "
                "and policy", "give every branch the rewards of all calls, or none",
            )  # fmt: skip
        if own and len(own) < calls[row]:
            raise SchemaError(
                "column rewards_per_call", len(own), f"must be one per call (row {row} has {calls[row]} calls)",
                "give a reward for each call, or none",
            )  # fmt: skip
