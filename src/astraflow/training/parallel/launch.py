"""The ranks of one trainer on this host: started together, ended together when one of them dies.

```
 astraflow trainer --ranks 2 ──┬─► astraflow trainer --rank 0 ...   speaks with the dataflow service
                               └─► astraflow trainer --rank 1 ...   does every step with it
```
No torch here. On several hosts `torchrun` does this.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from astraflow.errors import LaunchError, Problem

TICK_S = 0.1
GRACE_S = 5.0  # from the first rank that failed until the others, which mostly notice, are killed
LEAVE_S = 60.0  # from the first rank that ended well until the others must have
LOST = 3  # exit code of a rank that ended because another one was gone

log = logging.getLogger(__name__)


def run_ranks(
    policy: str, num_ranks: int, words: Sequence[str], environment: Mapping[str, str], stop: threading.Event
) -> None:
    """Start `astraflow trainer <words>` for each rank and wait until all of them have ended well.

    Args: stop: once set, all are told to end.
    Raises: LaunchError, or Problem when it is of no use to try again: a rank died; the others were ended.
    """
    log.info("trainer of %s: %d ranks", policy, num_ranks)
    with tempfile.TemporaryDirectory(prefix="astraflow-ranks-") as place:
        children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                here = ["--rank", str(rank), "--ranks", str(num_ranks), "--rendezvous", f"file://{place}/rendezvous"]
                command = [sys.executable, "-m", "astraflow", "trainer", *words, *here, "--parent", str(os.getpid())]
                children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(environment)))
            codes = _watched(children, stop)
        finally:
            for child in children:
                child.kill()
                child.wait()
    if failed := {rank: code for rank, code in enumerate(codes) if code}:
        raise _named(policy, num_ranks, failed)


def _watched(children: Sequence[subprocess.Popen[bytes]], stop: threading.Event) -> list[int | None]:
    """Exit codes at the moment when nothing more is to be waited for; None: it runs on."""
    told, deadline = False, float("inf")
    tick = threading.Event()
    while True:
        codes = [child.poll() for child in children]
        if None not in codes or time.monotonic() >= deadline:
            return [LOST if code is None else code for code in codes]
        if any(code is not None for code in codes):
            limit = GRACE_S if any(codes) else LEAVE_S
            deadline = min(deadline, time.monotonic() + limit)
        if stop.is_set() and not told:
            told = True
            for child in children:
                child.send_signal(signal.SIGTERM)
        tick.wait(TICK_S)


def _named(policy: str, num_ranks: int, failed: Mapping[int, int]) -> Problem:
    """The one to blame: killed, else with an error of its own, else (all miss another) the first."""
    worst = sorted(failed, key=lambda rank: (failed[rank] > 0, failed[rank] == LOST, rank))[0]
    kind = Problem if failed[worst] == 2 else LaunchError
    return kind(
        f"trainer of {policy}: rank {worst} of {num_ranks}", _cause(failed[worst]), "ended it, so all ranks were ended",
        "see its last lines above; started again they go on from the newest checkpoint",
    )  # fmt: skip


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
