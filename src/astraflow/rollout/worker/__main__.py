"""`python -m astraflow.rollout.worker <fd>`, started by `rollout.pool`.

It ends with its node: by the end of the channel, and on Linux by the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import sys

from astraflow.observe.logs import setup_logging
from astraflow.rollout.loop import run_loop
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


def main() -> None:
    """Entry point of `python -m astraflow.rollout.worker <fd>`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the node's to handle
    setup_logging("worker", level=logging.WARNING)  # of libraries that agents bring
    logging.getLogger("astraflow").setLevel(logging.INFO)
    run_loop(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
