"""Signs of life by use of an episode's key."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.swarm.door import SignsOfLife
from swarm_door import lease


async def test_a_key_is_in_use_until_the_last_of_its_calls_has_ended() -> None:
    gateway = Gateway({})
    key = gateway.open_episode(lease(0))
    ends = [asyncio.Event(), asyncio.Event()]
    calls = iter(ends)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await next(calls).wait()

    signs = SignsOfLife(gateway)
    watched, scope = signs.before(app), {"type": "http", "headers": [(b"x-api-key", key.encode())]}
    assert signs.last(key) == -math.inf
    running = [asyncio.ensure_future(watched(scope, None, None)) for _ in ends]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for task, end in zip(running, ends, strict=True):
        assert signs.last(key) == math.inf
        end.set()
        await task
    assert 0 < signs.last(key) < math.inf
    signs.forget(key)
    assert signs.last(key) == -math.inf
