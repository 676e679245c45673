"""A reward that blocks blocks its worker, never the loop that leads the node."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from rollout_bench import bench, lease

from astraflow.types import EpisodeLease, Task


def graded(number: int, released: Path | None) -> EpisodeLease:
    task = Task("train", number, 0, {"kind": "", "released": str(released or "")})
    return msgspec.structs.replace(lease("", number), task=task)


@pytest.mark.parametrize("workflow", ["graded_by_one_that_blocks", "graded_by_one_that_blocks_in_a_thread"])
async def test_the_loop_goes_on_beside_a_reward_that_blocks(workflow: str, tmp_path: Path) -> None:
    """The loop itself ends the block: were it blocked too, the reward would give up and the episode fail."""
    released = tmp_path / "released"
    async with bench(workflow, workers=2) as made:
        made.runner.accept([graded(0, released)])
        async with asyncio.timeout(20):
            while made.gateway.stats()["gateway/calls"] < 1:  # from here on it only waits for its reward
                await asyncio.sleep(0.01)
        for number in range(1, 4):  # on the worker that is free
            episodes = await made.play(graded(number, None), count=number)
            assert [e.trajectories[0].reward for e in episodes] == [0.5] * number
        assert made.runner.num_in_play == 1
        released.touch()
        blocked = (await made.play(count=4))[0]
    assert (blocked.error, blocked.trajectories[0].reward) == (None, 1.0)
    assert made.pool.num_restarts == 0


async def test_who_watches_names_what_a_blocked_worker_plays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with bench() as made:
            await made.play(lease("block", 0, timeout_s=0.5), lease("hang", 1))
    (said,) = [r.getMessage() for r in caplog.records if "has not turned its loop" in r.getMessage()]
    assert "train/0/0/0" in said and "train/0/1/0" not in said, said
