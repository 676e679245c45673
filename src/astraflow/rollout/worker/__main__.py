"""`python -m astraflow.rollout.worker <fd>`, started by `rollout.pool`.

It ends with its node: by the end of the channel, and on Linux by the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from astraflow.observe.logs import setup_logging
from astraflow.rollout.loop import run_loop
from astraflow.rollout.worker.output import count_output
from astraflow.rollout.worker.player import Worker

_PR_SET_PDEATHSIG = 1


async def serve(fd: int) -> None:
    """Play what the node sends over the socket `fd` until it hangs up."""
    worker = Worker()
    stream = socket.socket(fileno=fd)
    stream.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: worker.channel, sock=stream)
    await worker.finished.wait()


def die_with_parent() -> None:
    """Linux: the kernel kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def be_killed_first() -> None:
    """Linux: when memory runs out it is user code that ends, not the node or a trainer beside it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def keep_from_children(fd: int) -> None:
    """A child that user code forks must neither speak for this worker nor keep its end of the channel open."""

    def hide() -> None:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, fd, inheritable=False)
        os.close(nowhere)
        die_with_parent()

    os.register_at_fork(after_in_child=hide)


def main() -> None:
    """Entry point of `python -m astraflow.rollout.worker <fd>`."""
    die_with_parent()
    be_killed_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the node's to handle
    count_output()
    setup_logging("worker", level=logging.WARNING)  # of libraries that agents bring
    logging.getLogger("astraflow").setLevel(logging.INFO)
    channel = int(sys.argv[1])
    keep_from_children(channel)
    run_loop(serve(channel))


if __name__ == "__main__":
    main()
