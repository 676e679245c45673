"""Episodes on real worker processes: what a workflow does and how its episode ends."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from rollout_bench import LIMITS, Bench, bench, lease
from rollout_scripts import EOS, IDS, ids, right_calls

from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import AstraFlowError, EngineError
from astraflow.rollout.gateway.episode import EpisodeCapture
from astraflow.rollout.pool import WorkerPool
from astraflow.rollout.runner import build_episode, fitting
from astraflow.rollout.worker.channel import Hello
from astraflow.testing.dataflow import episode as made_episode
from astraflow.testing.dataflow import trajectory
from astraflow.types import Outcome, Task


async def test_every_ending_is_data():
    kinds = {
        "raise": "workflow: KeyError: 'boom'",
        "nan": "reward: reward=nan is not finite",
        "text": "reward: str 'good' is not a number",
        "silent": "workflow: the episode ended without one answered call",
        "unknown_policy": "reward: policy='judge' is not in this episode",
        "stream": "gateway: stream=true works over HTTP only",
        "overlong": "overlong: messages=5000 tokens are too many: this model's maximum context length is 4096",
        "odd_text": r"workflow: ValueError: half a pair: \udcff",
        "odd_error": r"judge: half a pair: \udcff",
        "odd_numbers": None,
        "outcome": None,
        "none": None,
        "openai": None,
    }
    async with bench() as made:
        episodes = await made.play(*(lease(kind, i) for i, kind in enumerate(kinds)))
        for episode, (kind, error) in zip(episodes, kinds.items(), strict=True):
            assert (episode.error or "").startswith(error or "") and bool(episode.error) == bool(error), (
                kind,
                episode.error,
            )
            assert bool(episode.trajectories) == (error is None)
        by_kind = dict(zip(kinds, episodes, strict=True))
        assert by_kind["outcome"].trajectories[0].reward == 0.5
        assert by_kind["outcome"].trajectories[0].rewards_per_call == (0.25,)
        assert by_kind["outcome"].metrics == {"success": 1.0}
        assert by_kind["odd_numbers"].trajectories[0].reward == 0.5
        assert by_kind["odd_numbers"].trajectories[0].rewards_per_call == (1.0,)
        assert by_kind["odd_numbers"].metrics == {"big": 1e30}
        assert by_kind["none"].trajectories[0].reward is None
        assert by_kind["openai"].trajectories[0].reward == len("[1+1]") + 6
        assert made.runner.endings["done"] == 4
        assert made.runner.endings["reward"] == 3
        assert made.runner.free == 100


def test_a_list_of_rewards_per_call_is_for_one_policy():
    capture = EpisodeCapture(lease("outcome"), {"solver": [], "judge": []})
    episode = build_episode(capture, "n", Outcome(reward=1.0, rewards_per_call=[1.0]), None, 0.0)
    assert episode.error is not None
    assert episode.error.startswith("reward: rewards_per_call=[1.0] must name a policy")
    assert "judge, solver" in episode.error


async def test_an_episode_that_the_service_would_refuse_for_its_length_is_an_error():
    async with bench() as made:
        (played,) = await made.play(lease("outcome"))
        size = sum(len(t.token_ids) for t in played.trajectories)
    for most, taken in ((size, True), (size - 1, False)):
        async with bench(max_tokens=most) as made:
            (episode,) = await made.play(lease("outcome"))
            assert bool(episode.trajectories) == (episode.error is None) == taken
            assert made.runner.endings == {"done" if taken else "overlong": 1}
    assert episode.error.startswith(f"overlong: tokens={size} must be at most {size - 1}; end it earlier")


@pytest.mark.parametrize("most", [9, 8])
def test_the_length_of_an_episode_counts_each_branch_with_its_prefix(most: int):
    rows = [trajectory(1.0, tokens=4), msgspec.structs.replace(trajectory(1.0, branch=1, tokens=3), fork_at=2)]
    taken = fitting(made_episode(lease("outcome"), "n", trajectories=rows), most)
    assert (taken.error is None) == bool(taken.trajectories) == (most == 9)


async def test_the_first_failure_of_each_kind_is_logged(caplog):
    async with bench() as made:
        with caplog.at_level("WARNING", "astraflow.node"):
            await made.play(*(lease(kind, i) for i, kind in enumerate(["nan", "nan", "overlong", "odd_kind"])))
        told = sorted(r.getMessage().split(" failed: ")[1] for r in caplog.records)
        assert len(told) == 3
        assert told[0].startswith("Judge! went wrong (others")
        assert told[1].startswith(
            "overlong: messages=5000 tokens are too many: this model's maximum context length is 4096"
        )
        assert told[2].startswith("reward: reward=nan is not finite")
        assert made.runner.endings == {"reward": 2, "overlong": 1, "other": 1}


async def test_a_hanging_episode_ends_at_its_deadline_and_its_neighbours_go_on():
    async with bench() as made:
        slow, quick = await made.play(lease("hang", 0, timeout_s=0.5), lease("outcome", 1))
        assert slow.error.startswith("timeout: the episode ran longer than")
        assert quick.error is None
        assert made.pool.num_restarts == 0


async def test_a_blocked_worker_is_killed_and_started_again():
    async with bench() as made:
        blocked, neighbour = await made.play(lease("block", 0, timeout_s=0.5), lease("hang", 1))
        assert blocked.error.startswith("timeout:")
        assert neighbour.error.startswith("worker_killed:")
        after = await made.play(lease("outcome", 2), count=3)
        assert after[2].error is None
        assert made.pool.num_restarts == 1


async def test_a_workflow_that_ignores_its_cancellation_is_given_up():
    async with bench() as made:
        episodes = await made.play(*(lease("stubborn", i, timeout_s=0.3) for i in range(2)))
        assert all(e.error.startswith("timeout:") for e in episodes)
        after = await made.play(lease("outcome", 5), count=3)
        assert after[-1].error is None


async def test_a_plain_function_runs_in_a_thread_and_may_hang_there():
    async with bench("in_a_thread") as made:
        hung, quick = await made.play(lease("block", 0, timeout_s=0.4), lease("fine", 1))
        assert hung.error.startswith("timeout:")
        assert (quick.error, quick.trajectories[0].reward) == (None, 5.0)
        assert made.pool.num_restarts == 0
        await made.play(lease("block", 2, timeout_s=0.4), count=3)  # the second stuck thread: the worker is replaced
        after = await made.play(lease("fine", 3), count=4)
        assert after[-1].error is None
        async with asyncio.timeout(60):
            while not made.pool.num_restarts:
                await asyncio.sleep(0.02)


async def test_a_call_that_the_workflow_gives_up_is_cancelled_and_not_trained():
    async with bench(held=True) as made:
        made.runner.accept([lease("give_up")])
        async with asyncio.timeout(60):
            while len(made.engine.seen) < 2:
                await asyncio.sleep(0.01)
        made.engine.release()
        (episode,) = await made.play(count=1)
        (trajectory,) = episode.trajectories
        assert trajectory.token_ids.tolist() == [*ids("1+1?[1+1]"), EOS]
        assert made.gateway.stats()["gateway/cancelled"] == 1


async def test_an_episode_waits_for_its_weights():
    async with bench() as made:
        made.runner.accept([lease("outcome", version=2)])
        assert (made.runner.num_in_play, made.runner.num_waiting, made.gateway.stats()["gateway/open_episodes"]) == (
            1,
            1,
            0,
        )
        made.engine.load_weights(1, {})
        made.runner.start_waiting()
        assert made.runner.num_waiting == 1
        made.engine.load_weights(2, {})
        made.runner.start_waiting()
        (episode,) = await made.play(count=1)
        assert set(episode.trajectories[0].versions[episode.trajectories[0].loss_mask].tolist()) == {2}


async def test_weights_that_never_come_are_an_error_that_names_them():
    async with bench() as made:
        made.runner.accept([lease("outcome", version=9, timeout_s=0.1)])
        deadlines = asyncio.create_task(made.runner.keep_deadlines(0.02))
        await made.play(count=1)
        deadlines.cancel()
        assert made.episodes[0].error.startswith("weights: of actor did not come in")


async def test_what_an_engine_that_ended_left_unfinished_is_not_committed():
    async with bench(held=True) as made:
        made.runner.accept([lease("outcome")])
        async with asyncio.timeout(60):
            while not made.engine.seen:
                await asyncio.sleep(0.01)
            made.engine.fail(EngineError("engine", "KeyError", "ended its thread", "see its log"))
            await made.runner.emptied()
        assert (made.episodes, made.runner.endings) == ([], {"cancelled": 1})


async def test_a_cancelled_episode_is_stopped_and_not_committed():
    async with bench(held=True) as made:
        made.runner.accept([lease("outcome", 0), lease("outcome", 1, version=5)])
        async with asyncio.timeout(60):
            while not made.engine.seen:
                await asyncio.sleep(0.01)
        made.runner.cancel([("train/0/0/0", 1), ("train/0/1/0", 1), ("unknown", 1)])
        async with asyncio.timeout(60):
            while made.runner.endings["cancelled"] < 2:
                await asyncio.sleep(0.01)
        assert made.episodes == []
        assert made.engine.stats()["running"] == 0
        assert made.gateway.stats()["gateway/open_episodes"] == 0


async def test_a_task_that_cannot_be_sent_fails_alone():
    async with bench() as made:
        odd = msgspec.structs.replace(lease("outcome", 0), task=Task("train", 0, 0, {"kind": "outcome", "n": 10**30}))
        failed, fine = await made.play(odd, lease("outcome", 1))
        assert failed.error.startswith("task: message=Start cannot be sent")
        assert fine.error is None
        assert made.gateway.stats()["gateway/open_episodes"] == 0


async def test_a_newer_attempt_replaces_an_older_one_and_a_repeated_lease_is_played_once():
    async with bench(held=True) as made:
        made.runner.accept([lease("outcome")])
        made.runner.accept([lease("outcome")])
        assert made.runner.num_in_play == 1
        made.runner.accept([lease("outcome", attempt=2)])
        assert made.runner.num_in_play == 1
        made.runner.cancel([("train/0/0/0", 1)])  # of the attempt that is gone
        made.engine.release()
        (episode,) = await made.play(count=1)
        assert episode.attempt == 2


async def test_a_broken_workflow_is_said_at_the_start():
    engine = ScriptedEngine([EOS])
    made = Bench("no_such_function", engine)
    with pytest.raises(AstraFlowError, match="no_such_function"):
        await made.pool.start()
    await made.pool.close()


async def test_room_waits_for_free_places():
    async with bench() as made:
        assert await made.runner.room(1) == 100
        made.runner.accept([lease("hang", i, timeout_s=0.3) for i in range(4)])
        assert made.runner.free == 96
        async with asyncio.timeout(60):
            assert await made.runner.room(1) == 100


async def test_a_runner_that_is_made_smaller_takes_no_more_until_there_is_room_again():
    async with bench() as made:
        made.runner.accept([lease("hang", i, timeout_s=0.3) for i in range(4)])
        made.runner.resize(2)
        assert (made.runner.free, made.runner.num_in_play) == (0, 4)
        async with asyncio.timeout(60):
            assert await made.runner.room(8) >= 1
            made.runner.accept([lease("hang", 9, timeout_s=30.0)])
            waits = asyncio.ensure_future(made.runner.room(1))
            await asyncio.sleep(0)
            assert not waits.done()
            made.runner.resize(6)
            made.runner.cancel_all()
            assert await waits == 6


def test_the_vocabulary_of_the_scripts_is_that_of_the_model():
    assert right_calls(np.array([IDS[c] for c in "3*4?"]), 0) == [*ids("[3*4]"), EOS]


async def test_a_worker_that_is_killed_while_it_starts_is_replaced():
    hello = Hello("rollout_scripts:ask_once", {}, ["actor"], "http://127.0.0.1:1/v1", LIMITS.pulse_s)
    pool = WorkerPool(1, hello, lambda: None, LIMITS)
    starting = asyncio.create_task(pool.start())
    while not pool._workers:
        await asyncio.sleep(0)
    pool._workers[0].process.kill()
    await asyncio.wait_for(starting, 60)
    assert (pool.num_ready, pool.num_restarts) == (1, 1)
    await pool.close()
