"""Pools of processes: what hangs, dies or raises costs its own call, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading

import psutil
import pytest

from astraflow.processes import pool as pools
from astraflow.processes.pool import ProcessPool
from astraflow.processes.process import Process
from astraflow.processes.records import CallFailed, Settings

TARGET = "process_targets:Bench"


@pytest.fixture
def make():
    made = []

    def make_(options=None, clean=False, **settings):
        chosen = Settings(**{"processes": 1, "deadline_s": 20.0, **settings})
        made.append(ProcessPool("bench", TARGET, options, chosen, clean=clean))
        return made[-1]

    yield make_
    for pool in made:
        pool.close()


def failure(future):
    with pytest.raises(CallFailed) as error:
        future.result(60)
    return error.value


@pytest.mark.parametrize("value", [None, 1, -2.5, "täxt\n\u2028", [1, [2]], {"a": {"b": []}}, "x" * 1_000_000])
def test_values_come_back_as_they_went(make, value):
    assert make().submit("echo", value).result(60) == value


def test_processes_start_when_they_are_needed_and_no_more_than_allowed(make):
    pool = make(processes=2)
    assert pool.health().starts == 0
    pool.submit("echo", 1).result(60)
    pool.submit("echo", 1).result(60)
    assert pool.health().starts == 1
    both = [pool.submit("pid") for _ in range(8)]
    assert len({future.result(60) for future in both}) <= 2
    assert pool.health().starts <= 2


@pytest.mark.parametrize("what", ["hang", "burn"])
def test_a_call_past_its_deadline_is_killed_and_the_next_one_works(make, what):
    pool = make()
    pid = pool.submit("pid").result(60)
    assert failure(pool.submit(what, deadline_s=0.2)).kind == "deadline"
    assert pool.submit("echo", 7).result(60) == 7
    assert pool.submit("pid").result(60) != pid
    assert not psutil.pid_exists(pid)
    health = pool.health()
    assert (health.kills, health.starts, health.lost) == (1, 2, 0)


def test_a_process_that_ends_is_replaced(make):
    pool = make()
    error = failure(pool.submit("die"))
    assert error.kind == "lost" and "exit 3" in str(error)
    assert pool.submit("echo", 7).result(60) == 7
    assert (pool.health().lost, pool.health().kills) == (1, 0)


@pytest.mark.parametrize(
    ("what", "said"),
    [("fail", "ValueError: this is wrong"), ("leave", "SystemExit: 4"), ("nothing", "AttributeError"),
     ("_kept", "private"), ("unsendable", "TypeError")],
)  # fmt: skip
def test_what_raises_costs_no_process(make, what, said):
    pool = make()
    error = failure(pool.submit(what))
    assert error.kind == "raised" and said in str(error)
    assert pool.submit("echo", 7).result(60) == 7
    assert (pool.health().starts, pool.health().raised) == (1, 1)


@pytest.mark.parametrize("argument", [object(), "half \ud800"])
def test_arguments_that_cannot_be_sent_cost_no_process(make, argument):
    pool = make()
    assert failure(pool.submit("echo", argument)).kind == "raised"
    assert pool.submit("echo", 7).result(60) == 7
    assert pool.health().starts == 1


def test_output_of_the_target_is_no_answer(make):
    assert make().submit("talk").result(60) == "said"


def test_what_the_process_started_ends_with_it(make):
    pool = make()
    child = pool.submit("child").result(60)
    assert failure(pool.submit("hang", deadline_s=0.2)).kind == "deadline"
    pool.submit("echo", 1).result(60)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_memory_has_a_limit(make):
    pool = make(memory_bytes=1 << 30)
    assert "MemoryError" in str(failure(pool.submit("hold", 2048)))
    assert pool.submit("hold", 10).result(60) == 10 << 20


def test_a_target_that_cannot_be_made_says_why_and_is_not_tried_for_ever(make):
    pool = make({"broken": True})
    for _ in range(3):
        error = failure(pool.submit("echo", 1))
        assert error.kind == "start" and "no such bench" in str(error)
    assert pool._no_start and failure(pool.submit("echo", 1)).kind == "start"
    pool._no_start_until = 0.0
    pool._hello = type(pool._hello)(TARGET, {}, 0)  # mended
    assert pool.submit("echo", 1).result(60) == 1


def test_processes_are_recycled_after_so_many_uses(make):
    pool = make(recycle_after=3)
    pids = [pool.submit("pid").result(60) for _ in range(9)]
    assert [len(set(pids[i : i + 3])) for i in (0, 3, 6)] == [1, 1, 1] and len(set(pids)) == 3
    assert pool.health().recycled >= 2


async def test_a_seat_keeps_its_process(make):
    pool = make(processes=2, seats=2)
    seats = [await pool.seat() for _ in range(4)]
    pids = [await seat.call("pid") for seat in seats]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
    for number in range(1, 4):
        sums = await asyncio.gather(*(seat.call("add", f"seat{place}", number) for place, seat in enumerate(seats)))
    assert sums == [6, 6, 6, 6]


async def test_who_asks_for_a_seat_waits_for_one(make):
    pool = make(seats=1)
    first = await pool.seat()
    asking = [asyncio.create_task(pool.seat()) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    assert not asking[1].done()
    first.release()
    first.release()
    second = await asking[1]
    assert pool.health().seats == 1 and not asking[2].done()
    async with second:
        assert await second.call("echo", 1) == 1
    (await asking[2]).release()
    assert pool.health().seats == 0


async def test_the_seats_of_a_killed_process_are_lost_and_free(make):
    pool = make(seats=2)
    bad, good = await pool.seat(), await pool.seat()
    await good.call("add", "x", 1)
    calls = [asyncio.create_task(bad.call("hang", deadline_s=0.3)), asyncio.create_task(good.call("add", "x", 1))]
    kinds = [getattr(result, "kind", None) for result in await asyncio.gather(*calls, return_exceptions=True)]
    assert kinds == ["deadline", "lost"]
    with pytest.raises(CallFailed, match="lost"):
        await good.call("add", "x", 1)
    bad.release()
    good.release()
    async with await pool.seat() as seat:
        assert await seat.call("add", "x", 1) == 1
    assert pool.health().seats == 0


async def test_a_worn_process_ends_when_its_last_seat_is_free(make):
    pool = make(seats=2, recycle_after=2)
    first, second = await pool.seat(), await pool.seat()
    pid = await first.call("pid")
    first.release()
    asking = asyncio.create_task(pool.seat())
    assert await second.call("pid") == pid and not asking.done()
    second.release()
    async with await asking as seat:
        assert await seat.call("pid") != pid


async def test_a_call_that_nobody_waits_for_is_not_made(make):
    pool = make()
    slow = asyncio.create_task(pool.call("hang", deadline_s=0.5))
    waiting = asyncio.create_task(pool.call("add", "x", 1))
    while pool.health().waiting != 1:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(CallFailed, match="deadline"):
        await slow
    assert await pool.call("add", "x", 1) == 1


def test_calls_from_threads_and_loops_get_the_same(make):
    pool, got = make(processes=2), []
    threads = [
        threading.Thread(target=lambda: got.append(asyncio.run(pool.call("echo", 5)))),
        threading.Thread(target=lambda: got.append(pool.submit("echo", 5).result(60))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [5, 5]


def test_a_closed_pool_says_so_and_leaves_no_process(make):
    pool = make()
    pid = pool.submit("pid").result(60)
    running, waiting = pool.submit("hang"), pool.submit("echo", 1)
    while pool.health().waiting != 1:
        threading.Event().wait(0.01)
    pool.close()
    assert {failure(f).kind for f in (running, waiting, pool.submit("echo", 1))} == {"closed"}
    assert not psutil.pid_exists(pid)


def test_closing_ends_a_process_that_is_being_killed(make, monkeypatch):
    pool, end, killing, closed = make(), Process.end, threading.Event(), threading.Event()
    pid = pool.submit("pid").result(60)

    def slow_end(process):
        if threading.current_thread() is not threading.main_thread():
            killing.set()
            closed.wait(60)
        end(process)

    monkeypatch.setattr(Process, "end", slow_end)
    pool.submit("hang", deadline_s=0.1)
    assert killing.wait(60)
    pool.close()
    gone = not psutil.pid_exists(pid)
    closed.set()
    assert gone


def test_processes_end_with_whoever_made_them(tmp_path):
    script = (
        "import os, sys; from astraflow.processes.pool import ProcessPool\n"
        f"pool = ProcessPool('bench', '{TARGET}'); pid = pool.submit('pid').result(60); pool.submit('burn')\n"
        "print(pid, flush=True); sys.stdin.readline(); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=env, text=True
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.communicate("\n")
    child.wait(60)


def test_a_clean_process_knows_no_secret_and_hashes_alike(make, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "secret")
    clean, other = make(clean=True), make()
    assert "secret" not in clean.submit("variables").result(60).values()
    assert other.submit("variables").result(60)["SOME_KEY"] == "secret"
    assert "ASTRAFLOW_TOKEN" not in other.submit("variables").result(60)
    assert clean.submit("hash").result(60) == other.submit("hash").result(60)


def test_health_is_said_now_and_then(make, monkeypatch, caplog):
    pool = make()
    caplog.set_level(logging.INFO, "astraflow.processes.pool")
    pool.submit("echo", 1).result(60)
    assert not caplog.records
    monkeypatch.setattr(pools, "HEALTH_S", 0.0)
    pool.submit("echo", 1).result(60)
    pool.submit("echo", 1).result(60)
    line = caplog.records[0].getMessage()
    assert all(word in line for word in ("bench:", "calls 2", "kills 0", "p99_ms", "alive 1")), line
