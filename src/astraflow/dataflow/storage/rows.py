"""From Arrow columns to the machine: the rows of a commit are checked, and what it must know of them read off.

No per-token Python, and as few passes over the tokens as possible: this runs in the event loop of the service.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.records import EpisodeCommit, Part, Put
from astraflow.errors import SchemaError
from astraflow.wire.codec import TRAJECTORY_SCHEMA, check_schema, flat_values, list_lengths
from astraflow.wire.messages import EpisodesHeader

# policy, sampled, oldest, newest, calls, reward, scored, truncated
_Row = tuple[str, int, int, int, int, float, bool, bool]


class RowFacts(NamedTuple):
    """What the machine must know of the rows of one request, in their order."""

    rows: list[_Row]
    rewards_per_call: dict[int, tuple[float, ...]]  # by row; absent: none given


def row_facts(header: EpisodesHeader, table: pa.Table, policies: Collection[str]) -> RowFacts:
    """Check the rows of one request and read off what matters.

    Raises: SchemaError: columns of another type or length, rows that do not fit the header, an unknown policy.
    """
    check_schema(table, TRAJECTORY_SCHEMA)
    names = _check_owners(header, table, policies)
    _refuse_empty(header, table)
    counts, oldest, newest = _version_stats(table)
    calls, rewards_per_call = _num_calls(table, counts), _rewards_per_call(table)
    for row, given in rewards_per_call.items():
        if len(given) < calls[row]:
            raise SchemaError(
                "column rewards_per_call", len(given), f"must be one per call (row {row} has {calls[row]} calls)",
                "give a reward for each call, or none",
            )  # fmt: skip
    rewards = table.column("reward").to_numpy()  # null becomes NaN
    scored = np.isfinite(rewards)
    truncated = table.column("truncated").to_numpy()
    columns = (counts, oldest, newest, calls, rewards, scored, truncated)
    return RowFacts(list(zip(names, *(x.tolist() for x in columns), strict=True)), rewards_per_call)


def episode_commits(header: EpisodesHeader, facts: RowFacts, put: Put | None) -> list[EpisodeCommit]:
    """Episodes of one request as the machine sees them; `put`: where their rows lie (None: there are none)."""
    commits, start, key = [], 0, put.key if put is not None else 0
    for episode in header.episodes:
        end = start + episode.num_rows
        parts = _parts(facts, start, end, key)
        commits.append(EpisodeCommit(episode.episode_id, episode.attempt, episode.error, episode.metrics, parts))
        start = end
    return commits


def _parts(facts: RowFacts, start: int, end: int, key: int) -> list[Part]:
    rows, calls = facts
    if end - start == 1:  # nearly every episode has one row
        policy, sampled, oldest, newest, num_calls, reward, scored, truncated = rows[start]
        given = calls.get(start, ()) if calls else ()
        score = reward if scored else None
        most = max(num_calls, len(given))
        return [Part(policy, key, [start], [oldest], newest, sampled, int(truncated), score, given, most)]
    by_policy: dict[str, list[int]] = {}
    for i in range(start, end):
        by_policy.setdefault(rows[i][0], []).append(i)
    return [_part(facts, policy, numbers, key) for policy, numbers in by_policy.items()]


def _part(facts: RowFacts, policy: str, numbers: list[int], key: int) -> Part:
    rows, calls = facts
    given = next((calls[i] for i in numbers if i in calls), ())
    return Part(
        policy=policy,
        put=key,
        rows=numbers,
        min_versions=[rows[i][2] for i in numbers],
        max_version=max(rows[i][3] for i in numbers),
        num_tokens=sum(rows[i][1] for i in numbers),
        num_truncated=sum(rows[i][7] for i in numbers),
        reward=next((rows[i][5] for i in numbers if rows[i][6]), None),
        rewards_per_call=given,
        num_calls=max(len(given), *(rows[i][4] for i in numbers)),
    )


def _check_owners(header: EpisodesHeader, table: pa.Table, policies: Collection[str]) -> list[str]:
    """Rows belong to the headers in order; returns the policy of each row."""
    expected = [e.episode_id for e in header.episodes for _ in range(e.num_rows)]
    owners: list[str] = table.column("episode_id").to_pylist()
    if owners != expected:
        row = next((i for i, (a, b) in enumerate(zip(owners, expected, strict=False)) if a != b), len(expected))
        raise SchemaError(
            "column episode_id", f"{len(owners)} rows", f"must follow the header ({len(expected)}; differs at {row})",
            "send the rows of each episode together, in the order of the header",
        )  # fmt: skip
    if len({e.episode_id for e in header.episodes}) != len(header.episodes):
        raise SchemaError("header.episodes", len(header.episodes), "must name each episode once", "send it once")
    names: list[str] = table.column("policy").to_pylist()
    unknown = set(names).difference(policies)
    if unknown:
        row = next(i for i, name in enumerate(names) if name in unknown)
        raise SchemaError(
            "column policy", names[row], f"is not a policy of this run (row {row})", "known: " + ", ".join(policies)
        )
    return names


def _refuse_empty(header: EpisodesHeader, table: pa.Table) -> None:
    """An episode without an error has tokens."""
    ends = np.concatenate([[0], np.cumsum(list_lengths(table.column("token_ids")))]).tolist()
    start = 0
    for episode in header.episodes:
        end = start + episode.num_rows
        if episode.error is None and ends[start] == ends[end]:
            raise SchemaError(
                "episode", episode.episode_id, f"must have tokens or an error (rows {start} to {end})",
                "commit what ended without an answered call with its error",
            )  # fmt: skip
        start = end


def _row_of(entry: int, lengths: np.ndarray) -> int:
    """The row in which this entry of a token column lies."""
    return int(np.searchsorted(np.cumsum(lengths), entry, "right"))


def _version_stats(table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row: sampled tokens, and oldest and newest version among them (-1: none).

    Raises: SchemaError: a sampled token without a version or with a logprob that is not a number.
    """
    lengths = list_lengths(table.column("token_ids"))
    mask = flat_values(table.column("loss_mask"))
    versions = flat_values(table.column("versions"))
    logprobs = flat_values(table.column("behavior_logprobs"))
    counts = np.zeros(len(lengths), np.int64)
    oldest = np.full(len(lengths), -1, np.int64)
    newest = np.full(len(lengths), -1, np.int64)
    if not len(mask):
        return counts, oldest, newest
    versions = _where_sampled("versions", versions, mask, lengths)
    if not (finite := np.isfinite(logprobs)).all():
        entry = int(np.argmin(finite))
        raise SchemaError(
            "column behavior_logprobs", float(logprobs[entry]), f"must be finite (row {_row_of(entry, lengths)})",
            "drop the episode as an error at its node",
        )  # fmt: skip
    filled = np.flatnonzero(lengths)
    starts = (np.cumsum(lengths) - lengths)[filled]
    counts[filled] = np.add.reduceat(mask.view(np.uint8), starts, dtype=np.int32)
    newest[filled] = np.maximum(np.maximum.reduceat(versions, starts), -1)
    low = np.minimum.reduceat(versions.view(np.uint32), starts)  # a negative one is larger than any version
    oldest[filled] = np.where(newest[filled] < 0, -1, low.astype(np.int64))
    return counts, oldest, newest


def _where_sampled(name: str, numbers: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`numbers`, negative exactly where the mask is False: rows should come like that, then nothing is copied."""
    if np.array_equal(numbers >= 0, mask):
        return numbers
    cleared = np.where(mask, numbers, numbers.dtype.type(-1))
    if np.array_equal(cleared >= 0, mask):
        return cleared
    entry = int(np.flatnonzero((cleared < 0) & mask)[0])
    raise SchemaError(
        f"column {name}", int(numbers[entry]),
        f"must be >= 0 where loss_mask is true (row {_row_of(entry, lengths)})",
        "record the engine's version and number of the call",
    )  # fmt: skip


def _num_calls(table: pa.Table, counts: np.ndarray) -> np.ndarray:
    """[rows] int64: calls that sampled a token up to the last one; 0 when none did.

    Raises: SchemaError: a sampled token of an episode of several calls that belongs to none.
    """
    index = flat_values(table.column("call_index"))
    if not len(index) or index.max() <= 0:  # one call each: the common case needs no more passes
        return (counts > 0).astype(np.int64)
    lengths = list_lengths(table.column("token_ids"))
    mask = flat_values(table.column("loss_mask"))
    index = _where_sampled("call_index", index, mask, lengths)
    calls = np.zeros(len(lengths), np.int64)
    filled = np.flatnonzero(lengths)
    starts = (np.cumsum(lengths) - lengths)[filled]
    calls[filled] = np.maximum(np.maximum.reduceat(index, starts).astype(np.int64), -1) + 1
    return calls


def _rewards_per_call(table: pa.Table) -> dict[int, tuple[float, ...]]:
    column = table.column("rewards_per_call")
    found = {}
    for row in np.flatnonzero(list_lengths(column)).tolist():
        values = column[row].as_py()
        if not all(math.isfinite(v) for v in values):
            raise SchemaError(
                "column rewards_per_call", values, f"must be finite (row {row})", "give a reward for each call, or none"
            )
        found[row] = tuple(values)
    return found
