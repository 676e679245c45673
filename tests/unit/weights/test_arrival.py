"""How a server waits for a version that has not come yet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from astraflow.testing.weights import make_tensors
from astraflow.weights import app as app_module
from astraflow.weights.store import FileStore
from astraflow.wire.app import HttpError


def test_nobody_looks_for_a_version_for_which_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileStore(tmp_path, "actor").publish(0, make_tensors(0))
    serving = app_module._Serving(tmp_path)

    async def two_readers() -> None:
        short, long = (asyncio.create_task(serving._arrival("actor", 1, wait_s)) for wait_s in (0.01, 3600.0))
        await short
        (look,) = serving._shared._running.values()
        await asyncio.sleep(3 * app_module.ARRIVAL_S)
        assert not look.done(), "the one that began it has left, and it goes on"
        long.cancel()
        await look
        assert not serving._waiting

    asyncio.run(asyncio.wait_for(two_readers(), 60))


def test_nobody_waits_for_a_policy_that_is_not_there(tmp_path: Path) -> None:
    serving = app_module._Serving(tmp_path)
    with pytest.raises(HttpError, match="policy=critic is not here"):
        asyncio.run(asyncio.wait_for(serving._arrival("critic", 1, 60.0), 60))
    assert not serving._waiting and not serving._shared._running
