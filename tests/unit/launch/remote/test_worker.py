"""`astraflow worker` against a real door: plays, reports, rides out a restart, takes up edits, leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from astraflow.errors import AstraFlowError, ConfigError
from astraflow.launch.remote.calls import Calls
from astraflow.launch.remote.worker import RemoteOptions, serve_worker
from astraflow.rollout.pool import PoolLimits
from swarm_door import DoorBench, lease

WORKFLOW = """
import asyncio, os
REWARD = 0.0


async def solve(task, llm, odd=False):
    kind = task["question"]
    reply = await llm["actor"].chat([{"role": "user", "content": "1+1=?"}])
    assert reply.content == "2"
    if kind == "hang":
        await asyncio.sleep(3600)
    if kind == "raise":
        raise KeyError("boom")
    if kind == "crash":
        os._exit(3)
    if kind == "unknown":
        return {"writer": 1.0}
    return {"actor": REWARD, "critic": 0.5}


def plain(task, llm):
    return float(len(llm["critic"].chat([{"role": "user", "content": "1+1=?"}]).content))
"""
LIMITS = PoolLimits(pulse_s=0.05, stall_s=1.0, grace_s=0.3)


def leases(*kinds, **options):
    import msgspec

    made = [lease(n, **options) for n in range(len(kinds))]
    return [
        msgspec.structs.replace(one, task=msgspec.structs.replace(one.task, fields={"question": kind}))
        for one, kind in zip(made, kinds, strict=True)
    ]


@pytest.fixture
def file(tmp_path, request):
    path = tmp_path / f"remote_{abs(hash(request.node.name))}.py"
    path.write_text(WORKFLOW)
    return path


class Playing:
    """A worker in a task; `send` is what its signal handler gets."""

    def __init__(self, task):
        self.task = task

    async def until(self, bench, condition):
        wait = asyncio.create_task(asyncio.to_thread(bench.wait_for, condition))
        await asyncio.wait({wait, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            self.task.result()
        await wait


@asynccontextmanager
async def worker(bench, file, name="solve", **options):
    import signal

    task = asyncio.create_task(
        serve_worker(
            RemoteOptions(url=bench.url, workflow=f"{file}:{name}", limits=LIMITS, **options), signals=(signal.SIGUSR1,)
        )
    )
    try:
        yield Playing(task)
    finally:
        if not task.done():
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait({task}, timeout=60)


async def test_episodes_are_played_and_reported_each_by_its_own_ending(file):
    kinds = ("fine", "raise", "unknown", "crash")
    with DoorBench(leases(*kinds)) as bench:
        async with worker(bench, file, concurrency=1) as playing:
            await playing.until(bench, lambda: len(bench.episodes) == 4)
            bench.say_over()
            await asyncio.wait_for(playing.task, 60)
    fine, failed, refused, crashed = sorted(bench.episodes, key=lambda e: e.task.row)
    assert {t.policy: t.reward for t in fine.trajectories} == {"actor": 0.0}
    assert failed.error == "workflow: KeyError: 'boom'"
    assert refused.error.startswith("reward: policy='writer' is not in this episode")
    assert crashed.error.startswith("worker_killed")
    assert len({e.code for e in bench.episodes}) == 1 and len(fine.code) == 12


async def test_a_plain_function_with_another_policy_and_a_token(file):
    with DoorBench(leases("fine"), token="secret") as bench:
        async with worker(bench, file, "plain", token="secret") as playing:
            await playing.until(bench, lambda: len(bench.episodes) == 1)
    assert {t.policy: t.reward for t in bench.episodes[0].trajectories} == {"critic": 1.0}


async def test_edits_are_taken_up_without_losing_an_episode(file):
    with DoorBench(leases("fine", "hang", timeout_s=3.0)) as bench:
        async with worker(bench, file, watch=True, concurrency=4) as playing:
            await playing.until(bench, lambda: len(bench.episodes) == 1)
            file.write_text(WORKFLOW.replace("REWARD = 0.0", "REWARD = 1.0"))
            old, row = bench.episodes[0].code, 10
            while all(e.code == old for e in bench.episodes):
                bench.call(lambda: bench.pending.append(lease(row)))  # noqa: B023
                await playing.until(bench, lambda: any(e.task.row == row for e in bench.episodes))  # noqa: B023
                row += 1
            await playing.until(bench, lambda: any(e.task.row == 1 for e in bench.episodes))
    assert not bench.returned
    *before, last = sorted(bench.episodes, key=lambda e: e.task.row)
    assert last.code != old and {t.reward for t in last.trajectories if t.policy == "actor"} == {1.0}
    assert {e.code for e in before} == {old}
    assert before[1].error.startswith("timeout: ")
    assert {e.trajectories[0].reward for e in before if e.error is None} == {0.0}


async def test_a_restart_of_the_node_costs_what_was_in_play_and_nothing_else(file):
    with DoorBench(leases("fine", "hang")) as bench:
        async with worker(bench, file, concurrency=4) as playing:
            await playing.until(bench, lambda: len(bench.episodes) == 1 and bench.swarm.pool.num_playing == 1)
            await asyncio.to_thread(bench.restart)
            bench.call(lambda: bench.pending.extend([lease(7)]))
            await playing.until(bench, lambda: len(bench.episodes) == 2)
            assert bench.episodes[1].task.row == 7
            await playing.until(bench, lambda: bench.swarm.pool.num_playing == 1)  # the next attempt of the other
            assert not playing.task.done()


async def test_told_to_leave_it_finishes_what_it_can_and_gives_the_rest_back(file):
    with DoorBench(leases("hang", "hang")) as bench:
        async with worker(bench, file, drain_s=0.2) as playing:
            await playing.until(bench, lambda: bench.swarm.pool.num_playing == 2)
            import signal

            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(playing.task, 60)
        await asyncio.to_thread(bench.wait_for, lambda: len(bench.returned) == 2)
    assert not bench.episodes
    assert [lost for *_, lost in bench.returned] == [False, False]


async def test_an_episode_that_is_not_wanted_any_more_is_stopped(file):
    with DoorBench(leases("hang"), dead_after_s=1.0) as bench:
        async with worker(bench, file) as playing:
            await playing.until(bench, lambda: bench.swarm.pool.num_playing == 1)
            bench.call(lambda: bench.swarm.runner.cancel([("train/0/0/0", 1)]))
            bench.call(lambda: bench.pending.extend([lease(5)]))
            await playing.until(bench, lambda: len(bench.episodes) == 1)
    assert [e.task.row for e in bench.episodes] == [5]


async def test_a_workflow_that_cannot_be_built_is_said_at_once(file, tmp_path):
    with DoorBench() as bench:
        with pytest.raises(ConfigError, match="no_such"):
            async with worker(bench, file, "no_such") as playing:
                await playing.task
        with pytest.raises(AstraFlowError, match="nowhere"):
            async with worker(bench, tmp_path / "nowhere.py") as playing:
                await playing.task


async def test_a_call_rides_out_a_cut_connection_and_gives_up_in_time():
    answers = [b"", b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]
    keys = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(4)
        keys.append(next(line for line in head.split(b"\r\n") if line.startswith(b"idempotency-key")))
        writer.write(answers.pop(0) if answers else b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    calls, now = Calls(f"http://127.0.0.1:{port}"), asyncio.get_running_loop().time
    assert await calls.ask("key", b"body", now() + 10) == (200, b"{}")
    assert len(keys) == 3 and len(set(keys)) == 1, "the gateway knows it again"
    status, body = await calls.ask("key", b"body", now() + 0.2)
    assert status == 503 and b"the door gave no answer" in body
    calls.close()
    server.close()


def test_a_worker_needs_the_base_package_only(tmp_path):
    """Also its worker processes: nothing heavy can be imported at all."""
    path = tmp_path / "light.py"
    path.write_text(
        "import sys\n\nasync def solve(task, llm):\n"
        '    await llm["actor"].chat([{"role": "user", "content": "1+1=?"}])\n'
        "    return float(any(m in sys.modules for m in ('torch', 'transformers', 'safetensors')))\n"
    )
    barred = tmp_path / "barred"
    for name in ("torch", "transformers", "safetensors", "tokenizers", "jinja2"):
        (barred / name).mkdir(parents=True)
        (barred / name / "__init__.py").write_text(f"raise RuntimeError('{name} is not installed here')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(barred), *(p for p in sys.path if p)])}
    with DoorBench([lease(0), lease(1)]) as bench:
        words = ["worker", "--url", bench.url, "--workflow", f"{path}:solve"]
        with subprocess.Popen(
            [sys.executable, "-m", "astraflow", *words], env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            bench.wait_for(lambda: len(bench.episodes) == 2)
            process.terminate()
            _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "left: 2 done" in told
    assert [e.trajectories[0].reward for e in bench.episodes] == [0.0, 0.0]
