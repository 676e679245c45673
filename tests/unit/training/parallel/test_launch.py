"""The process that starts the ranks of a trainer: who is to blame, and that nobody outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from astraflow.errors import LaunchError, Problem
from astraflow.training.parallel import launch

CODE = """
import os, signal, sys, time
rank = int(sys.argv[sys.argv.index("--rank") + 1])
words = sys.argv[sys.argv.index("trainer") + 1 + rank].split()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if words[0] == "exit": sys.exit(int(words[1]))
if words[0] == "dies": os.kill(os.getpid(), signal.SIGKILL)
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
        launch.run_ranks("actor", len(what), what, {}, stop or threading.Event())

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
