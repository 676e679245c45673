"""Whose rows those of a commit are: they follow the headers of their episodes, and those were leased."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from astraflow.dataflow.machine.evaluation import version_of
from astraflow.dataflow.machine.records import OpenGroup
from astraflow.errors import SchemaError
from astraflow.wire.messages import EpisodesHeader

_TASK = ("source", "row", "epoch")
_ORDER = "send the rows of each episode together, in the order of the header"


class Owners(NamedTuple):
    """Whose the rows are."""

    policies: list[str]  # of each row
    rounds: dict[int, int]  # rows of evaluation -> the round that they are of


def check_owners(
    header: EpisodesHeader, rows: pa.RecordBatch, policies: Collection[str], groups: Mapping[str, OpenGroup]
) -> Owners:
    """Rows belong to the headers in order, and say what their leases said.

    Args: groups: those whose episodes are played; of others the rows will not be kept.
    """
    ids, attempts = _from_header(header, rows.num_rows)
    group_ids = [episode_id.rpartition("/")[0] for episode_id in ids]
    _compare("episode_id", rows, ids)
    _compare("attempt", rows, attempts)
    _compare("group_id", rows, group_ids)
    played = {group_id: group for group_id in set(group_ids) if (group := groups.get(group_id)) is not None}
    tasks: dict[str, tuple[object, ...]] = {g: (group.source, group.row, group.epoch) for g, group in played.items()}
    said = list(zip(*(rows.column(name).to_pylist() for name in _TASK), strict=True))
    wanted = list(map(tasks.get, group_ids, said))  # what is not known is as it is said
    if said != wanted:
        for i, name in enumerate(_TASK):
            _compare(name, rows, [task[i] for task in wanted if task is not None])
    rounds = {g: version_of(g) for g, group in played.items() if group.purpose == "eval"}
    rounds_of_rows = {row: rounds[g] for row, g in enumerate(group_ids) if g in rounds} if rounds else {}
    names: list[str] = rows.column("policy").to_pylist()
    unknown = set(names).difference(policies)
    if unknown:
        row = next(i for i, name in enumerate(names) if name in unknown)
        raise SchemaError(
            "column policy", names[row], f"is not a policy of this run (row {row})", "known: " + ", ".join(policies)
        )
    return Owners(names, rounds_of_rows)


def _from_header(header: EpisodesHeader, num_rows: int) -> tuple[list[str], list[int]]:
    """Of each row: episode id and attempt."""
    ids, attempts, counts = [], [], []
    for episode in header.episodes:
        ids.append(episode.episode_id)
        attempts.append(episode.attempt)
        counts.append(episode.num_rows)
    if len(set(ids)) != len(ids):
        raise SchemaError("header.episodes", len(ids), "must name each episode once", "send it once")
    if counts and min(counts) < 0:
        raise SchemaError("header.num_rows", min(counts), "must be >= 0", "count the rows of each episode")
    if sum(counts) != num_rows:
        raise SchemaError(
            "column episode_id", f"{num_rows} rows", f"must follow the header ({sum(counts)} rows)", _ORDER
        )
    if num_rows == len(ids) and set(counts) == {1}:  # nearly always
        return ids, attempts
    spread = [i for i, count in enumerate(counts) for _ in range(count)]
    return [ids[i] for i in spread], [attempts[i] for i in spread]


def _compare(name: str, rows: pa.RecordBatch, wanted: Sequence[object]) -> None:
    """`wanted`: of each row."""
    found = rows.column(name).to_pylist()
    if found == wanted:
        return
    row = next(i for i, (got, value) in enumerate(zip(found, wanted, strict=True)) if got != value)
    rule, fix = ("must be that of its lease", "copy it from there")
    if name in ("episode_id", "attempt"):
        rule, fix = "must follow the header", _ORDER
    raise SchemaError(f"column {name}", found[row], f"{rule}, {wanted[row]} (row {row})", fix)


def check_sizes(header: EpisodesHeader, rows: pa.RecordBatch, lengths: np.ndarray, max_tokens: int) -> None:
    """An episode without an error has tokens, and none has more than a trainer is meant to take, which gets each branch
    with what comes before its fork. `lengths`: [rows] own tokens."""
    paths = lengths + np.maximum(rows.column("fork_at").to_numpy(), 0)
    one_row_each = len(paths) and all(episode.num_rows == 1 for episode in header.episodes)
    if one_row_each and lengths.all() and paths.max() <= max_tokens:  # nearly always
        return
    ends, start = [0, *np.cumsum(lengths).tolist()], 0
    path_ends = [0, *np.cumsum(paths).tolist()]
    for episode in header.episodes:
        end = start + episode.num_rows
        if episode.error is None and ends[start] == ends[end]:
            raise SchemaError(
                "episode", episode.episode_id, f"must have tokens or an error (rows {start} to {end})",
                "commit what ended without an answered call with its error",
            )  # fmt: skip
        if (tokens := path_ends[end] - path_ends[start]) > max_tokens:
            raise SchemaError(
                "episode.tokens", tokens, f"must be at most {max_tokens}, each branch with its prefix "
                f"({episode.episode_id}, row {start})",
                "commit it as an error, let episodes end earlier, or raise dataflow.max_episode_tokens",
            )  # fmt: skip
        start = end
