"""The rows of one episode and policy are the branches of a tree, which a trainer can put together."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from astraflow.errors import SchemaError
from astraflow.wire.messages import EpisodesHeader

_NONE = -1


def check_branches(header: EpisodesHeader, rows: pa.RecordBatch, names: list[str], lengths: np.ndarray) -> None:
    """Refuse what is no tree. In the common case, one row per episode and no fork, nothing is looked at row by row.

    Args: names: policy of each row. lengths: [rows] own tokens.
    Raises: SchemaError: a branch named twice, a parent that is not there or leads back to its child, a fork behind the
    end of its parent.
    """
    branches, parents, forks = (rows.column(name).to_numpy() for name in ("branch", "parent_branch", "fork_at"))
    if not len(branches):
        return
    roots = branches.min() >= 0 and parents.min() == parents.max() == _NONE and not forks.any()
    if roots and (len(branches) == 1 or max(e.num_rows for e in header.episodes) == 1):
        return
    _refuse("branch", branches, branches < 0, "must be >= 0", "number branches from 0")
    _refuse("parent_branch", parents, parents < _NONE, "must be -1 (none) or a branch", "name a branch that forks")
    wrong = (forks < 0) | ((parents == _NONE) & (forks > 0))
    _refuse("fork_at", forks, wrong, "must be >= 0, and 0 without a parent", "count tokens of the parent's full path")
    start = 0
    for episode in header.episodes:
        trees: dict[str, dict[int, int]] = {}  # policy -> branch -> row
        for row in range(start, start + episode.num_rows):
            branch = int(branches[row])
            if trees.setdefault(names[row], {}).setdefault(branch, row) != row:
                raise SchemaError(
                    "column branch", branch, f"must be named once by {episode.episode_id} for {names[row]} (row {row})",
                    "number the branches of an episode and policy",
                )  # fmt: skip
        for tree in trees.values():
            _check_tree(tree, parents, forks, lengths)
        start += episode.num_rows


def _check_tree(tree: dict[int, int], parents: np.ndarray, forks: np.ndarray, lengths: np.ndarray) -> None:
    """`tree`: branch -> row."""
    fix = "send all branches of an episode and policy in one commit, with the fork inside its parent's path"
    rooted: set[int] = {_NONE}
    for branch in tree:
        path: list[int] = []  # from here to a branch that is known to lead to a root
        for _ in tree:  # no path is longer
            if branch in rooted:
                break
            row = tree[branch]
            parent, fork = int(parents[row]), int(forks[row])
            path.append(branch)
            if parent != _NONE:
                if parent not in tree:
                    raise SchemaError("column parent_branch", parent, f"is not in the episode (row {row})", fix)
                end = int(forks[tree[parent]] + lengths[tree[parent]])
                if fork > end:
                    raise SchemaError("column fork_at", fork, f"is behind its parent's {end} tokens (row {row})", fix)
            branch = parent
        if branch not in rooted:
            row = tree[branch]
            raise SchemaError(
                "column parent_branch", int(parents[row]), f"leads back to its own branch (row {row})", fix
            )
        rooted.update(path)


def _refuse(name: str, values: np.ndarray, wrong: np.ndarray, rule: str, fix: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise SchemaError(f"column {name}", int(values[row]), f"{rule} (row {row})", fix)
