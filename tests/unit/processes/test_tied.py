"""A command that is tied to who started it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from astraflow.processes.tied import tied

SLEEPS = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]


def test_it_is_the_command() -> None:
    done = subprocess.run(tied(["sh", "-c", "cat; exit 3"]), input=b"hello", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"hello", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="the tie is made by Linux")
def test_it_ends_with_who_started_it() -> None:
    starts = f"import subprocess, sys\nfrom astraflow.processes.tied import tied\nsubprocess.run(tied({SLEEPS!r}))"
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        command = psutil.Process(int(process.stdout.readline()))
        process.kill()
    psutil.wait_procs([command], timeout=20)
    assert not command.is_running() or command.status() == psutil.STATUS_ZOMBIE
