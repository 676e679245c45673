"""The process that starts the ranks of a trainer: who is to blame, and that nobody outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from astraflow.errors import LaunchError, Problem
from astraflow.training.parallel import launch
from astraflow.training.parallel.ranks import RankLost
from astraflow.weights.shards import exchange

CODE = """
import os, signal, sys, time
rank = int(sys.argv[sys.argv.index("--rank") + 1])
words = sys.argv[sys.argv.index("trainer") + 1 + rank].split()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if words[0] == "exit": sys.exit(int(words[1]))
if words[0] == "dies": os.kill(os.getpid(), signal.SIGKILL)
if words[0] != "sleeps":
    from astraflow.training.parallel.launch import signs_of_life
    with signs_of_life(rank, sys.argv[sys.argv.index("--rendezvous") + 1]):
        if words[0] == "stops":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
time.sleep(float(words[1]))
"""


@pytest.fixture
def ranks(monkeypatch):
    """`ranks(stop, *what)`: run_ranks where each rank does what it is told; and the processes."""
    started = []
    original = subprocess.Popen

    def popen(command, **more):
        started.append(original([sys.executable, "-c", CODE, *command[3:]], **more))
        return started[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    monkeypatch.setattr(launch, "GRACE_S", 0.3)
    monkeypatch.setattr(launch, "LEAVE_S", 0.3)

    def run(*what, stop=None):
        launch.run_ranks("trainer of actor", len(what), ("trainer", *what), {}, stop or threading.Event())

    run.started = started
    return run


def test_all_ended_well(ranks):
    ranks("exit 0", "exit 0")
    assert [process.returncode for process in ranks.started] == [0, 0]


@pytest.mark.parametrize(
    ("what", "blamed", "kind"),
    [
        (("exit 3", "dies", "sleeps 60"), r"rank 1 of 3=signal 9 ended it", LaunchError),
        (("exit 3", "exit 1"), r"rank 1 of 2=exit code 1", LaunchError),
        (("exit 3", "exit 3"), r"rank 0 of 2=exit code 3", LaunchError),
        (("exit 2", "exit 3"), r"rank 0 of 2=exit code 2", Problem),
        (("exit 0", "sleeps 60"), r"rank 1 of 2=exit code 3", LaunchError),
    ],
)
def test_the_rank_to_blame_is_named_and_the_others_are_ended(ranks, what, blamed, kind):
    with pytest.raises(kind, match=f"trainer of actor: {blamed}") as caught:
        ranks(*what)
    assert caught.value.exit_code == (2 if kind is Problem else 1)
    assert all(process.returncode is not None for process in ranks.started)


def test_a_stop_is_told_to_all(ranks):
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    ranks("sleeps 60", "sleeps 60", stop=stop)
    assert {process.returncode for process in ranks.started} <= {0, -signal.SIGTERM}


def test_a_rank_that_stands_still_is_named_and_all_are_ended(ranks, monkeypatch):
    monkeypatch.setattr(launch, "SILENCE_S", 4.0)
    with pytest.raises(LaunchError, match=r"rank 1 of 3=no sign of life for 4 s ended it, so all ranks were ended"):
        ranks("lives", "stops", "lives")
    assert all(process.returncode == -signal.SIGKILL for process in ranks.started)


def test_silence_is_that_of_each_rank_since_its_last_sign(tmp_path):
    signs = [tmp_path / "rank-0", tmp_path / "rank-1"]
    silence = launch.Silence(signs)
    half = launch.SILENCE_S / 2
    for i, sign in enumerate(signs):
        sign.touch()
        os.utime(sign, ns=(i + 1, i + 1))
    assert silence.after(launch.SILENCE_S) == []  # they have just been seen
    assert silence.after(half) == []
    os.utime(signs[0], ns=(9, 9))
    assert silence.after(half) == [1]
    assert silence.after(half) == [1]
    assert silence.after(half) == [0, 1]


def test_a_rank_that_misses_another_one_says_so_wherever_it_notices() -> None:
    """In a step, or while the parts of a version are gathered: the rank that died is to blame, not this one."""
    assert RankLost.exit_code == exchange.RankLost.exit_code == launch.LOST
