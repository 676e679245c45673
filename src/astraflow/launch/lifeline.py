"""A child of the launcher dies with it, however the launcher dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int) -> None:
    """Called by a child at its start: SIGKILL comes when `parent_pid` ends. The run goes on with `--resume`.

    The parent is checked after the tie is made, so a parent that died before it is noticed too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="lifeline", daemon=True).start()
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent_pid: int) -> None:
    tick = threading.Event()
    while not tick.wait(0.5):
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)
