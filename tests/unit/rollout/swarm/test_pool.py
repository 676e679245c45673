"""Clients as a pool: what a request that goes away leaves behind."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from astraflow.rollout.swarm.pool import SwarmPool
from astraflow.wire.swarm.messages import PlaysRequest
from swarm_door import lease


class Never:
    """No key is ever used."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def last(self, key: str) -> float:
        return -math.inf

    def forget(self, key: str) -> None:
        self.forgotten.append(key)


class Given:
    """An episode that remembers that it was given back."""

    def __init__(self) -> None:
        self.key, self.lease, self.timeout_s = "k", lease(0), 9.0
        self.lost: list[bool] = []

    def asked(self, ask: Any, channel: Any) -> None:
        raise NotImplementedError

    def dropped(self, call: int) -> None:
        raise NotImplementedError

    def ended(self, outcome: Any, error: str | None, code: str = "") -> str | None:
        raise NotImplementedError

    def given_back(self, *, lost: bool) -> None:
        self.lost.append(lost)


async def asking(pool: SwarmPool, count: int) -> list[asyncio.Task[Any]]:
    """The same request, `count` times, and an episode for it that no answer has told of yet."""
    request = PlaysRequest(client="c", request_id="r")
    tasks = [asyncio.ensure_future(pool.ask(request)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_what_a_client_that_hung_up_was_not_told_of_goes_back_and_counts_as_no_attempt() -> None:
    signs, player = Never(), Given()
    pool = SwarmPool(9.0, signs, lambda: None)
    (task,) = await asking(pool, 1)
    pool.place(player)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert player.lost == [False] and pool.num_playing == pool.asked == 0 and signs.forgotten == ["k"]


async def test_what_a_repeated_request_still_waits_for_is_kept() -> None:
    pool, player = SwarmPool(9.0, Never(), lambda: None), Given()
    first, again = await asking(pool, 2)
    pool.place(player)
    first.cancel()
    (held,) = await again
    assert held.player is player and player.lost == [] and pool.num_playing == 1
