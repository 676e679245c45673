"""Whose rows those of a commit are: they follow the headers of their episodes."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa

from astraflow.errors import SchemaError
from astraflow.wire.messages import EpisodesHeader


def check_owners(header: EpisodesHeader, rows: pa.RecordBatch, policies: Collection[str]) -> list[str]:
    """Rows belong to the headers in order; returns the policy of each row."""
    expected = [e.episode_id for e in header.episodes for _ in range(e.num_rows)]
    owners: list[str] = rows.column("episode_id").to_pylist()
    if owners != expected:
        row = next((i for i, (a, b) in enumerate(zip(owners, expected, strict=False)) if a != b), len(expected))
        raise SchemaError(
            "column episode_id", f"{len(owners)} rows", f"must follow the header ({len(expected)}; differs at {row})",
            "send the rows of each episode together, in the order of the header",
        )  # fmt: skip
    if len({e.episode_id for e in header.episodes}) != len(header.episodes):
        raise SchemaError("header.episodes", len(header.episodes), "must name each episode once", "send it once")
    names: list[str] = rows.column("policy").to_pylist()
    unknown = set(names).difference(policies)
    if unknown:
        row = next(i for i, name in enumerate(names) if name in unknown)
        raise SchemaError(
            "column policy", names[row], f"is not a policy of this run (row {row})", "known: " + ", ".join(policies)
        )
    return names


def refuse_empty(header: EpisodesHeader, lengths: np.ndarray) -> None:
    """An episode without an error has tokens."""
    ends, start = [0, *np.cumsum(lengths).tolist()], 0
    for episode in header.episodes:
        end = start + episode.num_rows
        if episode.error is None and ends[start] == ends[end]:
            raise SchemaError(
                "episode", episode.episode_id, f"must have tokens or an error (rows {start} to {end})",
                "commit what ended without an answered call with its error",
            )  # fmt: skip
        start = end
