"""`python -I tied.py <pid> COMMAND...`: becomes the command, which Linux kills when the process `pid` that started
it has ended; elsewhere it is the command alone. Imports nothing of AstraFlow.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """What to start instead of `command`, from the thread that lives as long as it shall."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the tie was made
            return
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
