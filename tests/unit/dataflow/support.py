"""Small runs for the tests of this room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from astraflow.config.schema import RunConfig
from astraflow.types import Episode, EpisodeLease, Task, Trajectory


class Rows:
    """A source of `size` rows; `salt` changes its content."""

    def __init__(self, size: int = 10, salt: str = "") -> None:
        self._size, self._salt = size, salt

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        return {"question": f"q{index}{self._salt}"}

    def fingerprint(self) -> str:
        return f"rows/{self._size}/{self._salt}"


def config(**changes: Any) -> RunConfig:
    """A run of one policy "actor": 2 groups of 2 a batch, staleness 1, 5 steps. `changes` by dotted path with `__`."""
    raw: dict[str, Any] = {
        "run": {"name": "t", "steps": 5, "seed": 3},
        "sources": {"train": {"type": "sums"}, "held": {"type": "sums"}},
        "workflow": {"type": "single_turn", "group_size": 2, "timeout_s": 20.0, "max_attempts": 2},
        "policies": {"actor": policy()},
    }
    for path, value in changes.items():
        node, keys = raw, path.split("__")
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
    return RunConfig.model_validate(raw)


def policy(groups: int = 2, max_staleness: int = 1, **more: Any) -> dict[str, Any]:
    """A policy section."""
    batch = {"groups": groups, "max_staleness": max_staleness, **more.pop("batch", {})}
    return {"model": "tiny-char", "batch": batch, **more}


def sources(size: int = 10, salt: str = "", held: int = 3) -> dict[str, Rows]:
    return {"train": Rows(size, salt), "held": Rows(held)}


def trajectory(
    reward: float | None, version: int, *, policy: str = "actor", branch: int = 0, tokens: int = 4, marker: int = 7
) -> Trajectory:
    """`tokens` tokens of which the first is given; token ids start at `marker`."""
    mask = np.arange(tokens) > 0
    return Trajectory(
        policy=policy,
        branch=branch,
        parent_branch=branch - 1,
        fork_at=0,
        token_ids=np.arange(marker, marker + tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int16),
        reward=reward,
    )


def episode(
    lease: EpisodeLease,
    node_id: str,
    reward: float | None = 1.0,
    version: int = 0,
    *,
    error: str | None = None,
    trajectories: list[Trajectory] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Episode:
    """What a node commits for `lease`."""
    if trajectories is None:
        trajectories = [] if error is not None else [trajectory(reward, version)]
    return Episode(
        episode_id=lease.episode_id,
        attempt=lease.attempt,
        node_id=node_id,
        task=lease.task,
        trajectories=trajectories,
        error=error,
        metrics=dict(metrics or {}),
    )


def task(row: int = 0) -> Task:
    return Task("train", row, 0, {"question": "?"})
