"""Whatever user code does is an error of its episode, by kind; the pool and the other episodes go on."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest
from rollout_bench import LIMITS, bench, lease

from astraflow.rollout.pool import PoolLimits

FILE = """
import asyncio, logging, os, subprocess, sys, time
from astraflow.types import Outcome


async def play(task, llm):
    kind = task["kind"]
    await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
    if kind == "idle":
        await asyncio.sleep(3600)
    if kind == "blocked":
        time.sleep(3600)
    if kind == "busy":
        for _ in range(6):
            await asyncio.sleep(0.1)
            await llm["actor"].chat([{"role": "user", "content": "1+1?"}])
    if kind == "raise_base":
        raise KeyboardInterrupt("not from a keyboard")
    if kind == "exit":
        sys.exit("bye")
    if kind == "crash":
        os._exit(3)
    if kind == "print":
        for _ in range(1000):
            print("x" * 100)
    if kind == "print_and_catch":
        for _ in range(1000):
            try:
                print("x" * 100)
            except Exception:
                pass
        await asyncio.sleep(0)
    if kind == "print_a_bit":
        print("x" * 1000)
    if kind == "log":
        for _ in range(1000):
            logging.getLogger("agent").warning("x" * 100)
        await asyncio.sleep(3600)
    if kind == "child_floods":
        await asyncio.to_thread(subprocess.run, ["yes"])
    if kind == "leak":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1) * (8 << 20)))
            await asyncio.sleep(0)
    if kind == "many_children":
        kept = [subprocess.Popen(["sleep", "1000"]) for _ in range(20)]
        await asyncio.sleep(3600)
    if kind == "child_stays":
        return float(subprocess.Popen(["sleep", "1000"]).pid)
    if kind == "fork_stays":
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
            os._exit(0)
        return float(pid)
    if kind == "fork_goes_on":
        return 1.0 if os.fork() else 2.0
    if kind == "fork_then_crash":
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        os._exit(3)
    if kind == "coroutine":
        return asyncio.sleep(0)
    if kind == "no_await":
        return len(llm["actor"].chat([]).text)
    return {
        "nothing": None, "text": "good", "nan": float("nan"), "inf": float("inf"), "minus_inf": -float("inf"),
        "unknown": {"judge": 1.0}, "bool": True, "wrong_keys": {1: 1.0}, "wrong_values": {"actor": "good"},
        "list": [1.0], "object": object(), "outcome": Outcome(reward="good"), "class": Outcome,
        "metrics": Outcome(reward=1.0, metrics={"x": "y"}),
    }.get(kind, 1.0)


def play_in_thread(task, llm):
    kind = task["kind"]
    llm["actor"].chat([{"role": "user", "content": "1+1?"}])
    if kind == "exit":
        sys.exit("bye")
    while kind == "print":
        print("x" * 100)
    return 1.0
"""
SMALL = PoolLimits(
    pulse_s=0.05, stall_s=1.0, grace_s=0.3, max_left_running=4, memory_bytes=256 << 20, max_processes=10,
    max_output_per_s=4 << 20,
)  # fmt: skip


@pytest.fixture
def workflow(tmp_path):
    path = tmp_path / "isolated_play.py"
    path.write_text(FILE)
    return lambda name="play": f"{path}:{name}"


ENDINGS = {
    "nothing": None, "bool": None, "fine": None, "print_a_bit": None,
    "text": "reward: str 'good' is not a number", "nan": "reward: reward=nan", "inf": "reward: reward=inf",
    "minus_inf": "reward: reward=-inf", "unknown": "reward: policy='judge' is not in this episode",
    "wrong_keys": "reward: policy='1' is not in", "wrong_values": "reward: actor=str 'good' is not a number",
    "list": "reward: list [1.0]", "object": "reward: object ", "outcome": "reward: str 'good'", "class": "reward: ",
    "coroutine": "reward: coroutine", "metrics": "reward: metrics['x']=str 'y'",
    "no_await": "workflow: AttributeError: 'coroutine' object has no attribute 'text'; is there an `await` missing?",
    "raise_base": "workflow: KeyboardInterrupt",
    "exit": "workflow: SystemExit: bye", "print": "output: the episode wrote more than 20000 bytes",
    "print_and_catch": "output: ", "log": "output: ",
}  # fmt: skip


async def test_an_ending_harms_nobody_else(workflow):
    async with bench(workflow(), max_output_bytes=20_000) as made:
        episodes = await made.play(*(lease(kind, i) for i, kind in enumerate(ENDINGS)))
        for episode, (kind, error) in zip(episodes, ENDINGS.items(), strict=True):
            assert (episode.error is None) == (error is None), (kind, episode.error)
            assert (episode.error or "").startswith(error or ""), (kind, episode.error)
        assert made.pool.num_restarts == 0
        assert made.runner.endings == {"done": 4, "reward": 13, "workflow": 3, "output": 3}


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("crash", "worker_killed: "), ("fork_then_crash", "worker_killed: "), ("leak", "memory: "),
        ("many_children", "processes: "), ("child_floods", "output: its worker process wrote more than"),
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.platform != "linux", reason="memory and processes are read from /proc")
async def test_what_takes_its_worker_with_it_is_told_by_kind_and_the_pool_goes_on(workflow, kind, error):
    async with bench(workflow(), limits=SMALL) as made:
        (episode,) = await made.play(lease(kind, 0))
        assert episode.error.startswith(error)
        after = await made.play(lease("fine", 1), count=2)
        assert after[1].error is None
        assert made.pool.num_restarts == 1
        assert set(made.runner.endings) == {error.split(":")[0], "done"}


async def test_a_call_that_takes_too_long_fails_and_is_cancelled(workflow):
    async with bench(workflow(), held=True, call_timeout_s=0.1) as made:
        (episode,) = await made.play(lease("fine", 0))
        assert episode.error.startswith(
            "call_timeout: call=0.1 s is all that a call may take; ask for fewer tokens, or"
        )
        assert made.engine.stats()["running"] == 0


@pytest.mark.parametrize("kind", ["idle", "blocked"])
async def test_a_workflow_that_makes_no_call_for_too_long_fails_and_a_busy_one_does_not(workflow, kind):
    async with bench(workflow(), step_timeout_s=0.5, workers=2) as made:
        idle, busy = await made.play(lease(kind, 0), lease("busy", 1))
        assert idle.error.startswith("step_timeout: the workflow made no call for 0.5 s")
        assert busy.error is None
        assert (await made.play(lease("fine", 2), count=3))[2].error is None


@pytest.mark.parametrize("kind", ["child_stays", "fork_stays"])
async def test_children_that_stay_end_with_their_worker(workflow, kind):
    async with bench(workflow()) as made:
        (episode,) = await made.play(lease(kind, 0))
        child = psutil.Process(int(episode.trajectories[0].reward))
        assert child.is_running()
        after = await made.play(lease("fine", 1), count=2)
        assert after[1].error is None, "a child that was forked does not speak for the worker"
    await asyncio.to_thread(lambda: psutil.wait_procs([child], timeout=60))
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_fork_that_goes_on_as_if_it_were_the_worker_says_nothing_to_the_node(workflow):
    async with bench(workflow()) as made:
        played = await made.play(*(lease("fork_goes_on", n) for n in range(3)), lease("fine", 3))
        assert [e.trajectories[0].reward for e in played] == [1.0] * 4
        after = await made.play(*(lease("fine", n) for n in range(4, 8)), count=8)
        assert [e.error for e in after] == [None] * 8
        assert made.pool.num_restarts == 0


async def test_threads_pay_for_their_output_and_may_exit(workflow):
    async with bench(workflow("play_in_thread"), max_output_bytes=20_000) as made:
        flood, gone, fine = await made.play(lease("print", 0), lease("exit", 1), lease("fine", 2))
        assert flood.error.startswith("output: ")
        assert gone.error.startswith("workflow: ")
        assert fine.error is None


async def test_what_workers_write_reaches_the_log_of_the_node_and_no_more_than_it_takes(workflow, capsys):
    async with bench(workflow(), limits=LIMITS) as made:
        (episode,) = await made.play(lease("print_a_bit", 0))
        assert episode.error is None
    assert "x" * 1000 in capsys.readouterr().err
    assert made.pool.notes() == {"code": episode.code}


async def test_a_pool_that_is_closed_while_it_starts_a_worker_leaves_none_behind(workflow):
    async with bench(workflow()) as made:
        starting = asyncio.create_task(made.pool._spawn())
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        await made.pool.close()
        assert [w.process.returncode is not None for w in made.pool._gone] == [True, True]
