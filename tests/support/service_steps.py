"""Playing and training through a real client: what tests of the service do to get it somewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.testing.dataflow import episode
from astraflow.types import EpisodeLease


def reward_of(lease: EpisodeLease) -> float:
    return float(int(lease.episode_id[-1]) % 2)


def play(client: DataflowClient, n: int, version: int = 0, node: str = "n") -> list[EpisodeLease]:
    leases = client.lease(node, n).leases
    answers = client.commit([episode(x, node, reward_of(x), version) for x in leases])
    assert set(answers.values()) <= {"accepted"}
    return leases


def step(client: DataflowClient, version: int, **metrics: float) -> list[str]:
    got = client.batch("actor", "t", version, wait_s=5)
    assert got is not None
    client.ack(got[0], "t", metrics)
    return got[1].column("episode_id").to_pylist()


def status_of(call: Callable[[], Any]) -> int | None:
    with pytest.raises(WireError) as caught:
        call()
    return caught.value.status
