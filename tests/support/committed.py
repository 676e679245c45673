"""Requests that commit the episodes of a test, as the service reads them."""

from __future__ import annotations

import pyarrow as pa

from astraflow.dataflow.storage.commits.rows import Known, RowFacts, row_facts
from astraflow.testing.dataflow import episode
from astraflow.types import Episode, EpisodeLease, Task, Trajectory
from astraflow.wire.codec import read_stream, write_stream
from astraflow.wire.episodes import encode_episodes
from astraflow.wire.messages import EpisodesHeader

KNOWN = Known({"actor": 50, "verifier": 50})


def lease(k: int = 0) -> EpisodeLease:
    return EpisodeLease(
        episode_id=f"train/0/5/{k}", group_id="train/0/5", attempt=1, task=Task("train", 5, 0, {}), timeout_s=1.0,
        min_versions={}, sampling={},
    )  # fmt: skip


def sent(*episodes: Episode) -> tuple[EpisodesHeader, pa.Table]:
    return read_stream(write_stream(*encode_episodes(episodes, "n")), EpisodesHeader)


def parsed(*episodes: Episode) -> tuple[EpisodesHeader, RowFacts]:
    header, table = sent(*episodes)
    return header, row_facts(header, table, KNOWN)


def with_trajectories(*rows: Trajectory, k: int = 0) -> Episode:
    return episode(lease(k), "n", trajectories=list(rows))
