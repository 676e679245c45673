"""The ranks of one trainer on this host: started together, ended together when one of them dies.

```
 astraflow trainer --ranks 2 ──┬─► astraflow trainer --rank 0 ...   speaks with the dataflow service
                               └─► astraflow trainer --rank 1 ...   does every step with it
```
Each gives a sign of life every second, so that one which stands still is named and ended too: the others would wait for
it. No torch here. On several hosts `torchrun` does this, and `ranks.TIMEOUT_S` ends what waits for a rank that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from astraflow.errors import LaunchError, Problem

TICK_S = 0.1
BEAT_S = 1.0
SILENCE_S = 120.0  # without a sign of life until a rank counts as hung: reading a large tensor may hold up all threads
GRACE_S = 5.0  # from the first rank that failed until the others, which mostly notice, are killed
LEAVE_S = 60.0  # from the first rank that ended well until the others must have
LOST = 3  # exit code of a rank that ended because another one was gone

log = logging.getLogger(__name__)


def run_ranks(
    what: str, num_ranks: int, words: Sequence[str], environment: Mapping[str, str], stop: threading.Event
) -> None:
    """Start `astraflow <words>` for each rank and wait until all of them have ended well.

    Args: what: they are, for people. stop: once set, all are told to end.
    Raises: LaunchError, or Problem when it is of no use to try again: a rank died or hangs; all were ended.
    """
    log.info("%s: %d ranks", what, num_ranks)
    with tempfile.TemporaryDirectory(prefix="astraflow-ranks-") as place:
        children: list[subprocess.Popen[bytes]] = []
        silence = Silence([_sign(f"file://{place}/rendezvous", rank) for rank in range(num_ranks)])
        try:
            for rank in range(num_ranks):
                here = ["--rank", str(rank), "--ranks", str(num_ranks), "--rendezvous", f"file://{place}/rendezvous"]
                command = [sys.executable, "-m", "astraflow", *words, *here, "--parent", str(os.getpid())]
                children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=dict(environment)))
            codes = _watched(children, stop, silence)
        finally:
            for child in children:
                child.kill()
                child.wait()
    if silent := [rank for rank, code in enumerate(codes) if code is None]:
        raise LaunchError(
            f"{what}: rank {', '.join(map(str, silent))} of {num_ranks}",
            f"no sign of life for {SILENCE_S:g} s", "ended it, so all ranks were ended",
            "look for what holds it (a stopped process, a disk or GPU that does not answer, too little memory); "
            "a trainer that is started again goes on from its newest checkpoint",
        )  # fmt: skip
    if failed := {rank: code for rank, code in enumerate(codes) if code}:
        raise _named(what, num_ranks, failed)


class Silence:
    """For how long ranks gave no sign of life. Counted in ticks of this process: a host that stood still, or that woke
    up, is no rank's fault."""

    def __init__(self, signs: Sequence[Path]) -> None:
        """`signs`: the files that the ranks touch."""
        self._signs = signs
        self._seen = [0] * len(signs)
        self._silent_s = [0.0] * len(signs)

    def after(self, seconds: float) -> list[int]:
        """The ranks that are hung, when so much time has passed since the last call."""
        for rank, sign in enumerate(self._signs):
            touched = sign.stat().st_mtime_ns if sign.exists() else 0
            self._silent_s[rank] = 0.0 if touched != self._seen[rank] else self._silent_s[rank] + seconds
            self._seen[rank] = touched
        return [rank for rank, silent_s in enumerate(self._silent_s) if silent_s >= SILENCE_S]


@contextlib.contextmanager
def signs_of_life(rank: int, rendezvous: str) -> Iterator[None]:
    """Inside, a thread of this rank gives them to the `run_ranks` that started it with this rendezvous."""
    sign, ended = _sign(rendezvous, rank), threading.Event()

    def beat() -> None:
        with contextlib.suppress(FileNotFoundError):  # whoever started it is gone, and ends it too
            while not ended.is_set():
                sign.touch()
                ended.wait(BEAT_S)

    thread = threading.Thread(target=beat, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sign(rendezvous: str, rank: int) -> Path:
    return Path(rendezvous.removeprefix("file://")).with_name(f"rank-{rank}")


def _watched(children: Sequence[subprocess.Popen[bytes]], stop: threading.Event, silence: Silence) -> list[int | None]:
    """Exit codes at the moment when nothing more is to be waited for; None: it hangs."""
    told, deadline = False, float("inf")
    tick = threading.Event()
    while True:
        codes = [child.poll() for child in children]
        if None not in codes or time.monotonic() >= deadline:
            return [LOST if code is None else code for code in codes]
        if hung := [rank for rank in silence.after(TICK_S) if codes[rank] is None]:
            return [None if rank in hung else 0 for rank in range(len(codes))]
        if any(code is not None for code in codes):
            limit = GRACE_S if any(codes) else LEAVE_S
            deadline = min(deadline, time.monotonic() + limit)
        if stop.is_set() and not told:
            told = True
            for child in children:
                child.send_signal(signal.SIGTERM)
        tick.wait(TICK_S)


def _named(what: str, num_ranks: int, failed: Mapping[int, int]) -> Problem:
    """The one to blame: killed, else with an error of its own, else (all miss another) the first."""
    worst = sorted(failed, key=lambda rank: (failed[rank] > 0, failed[rank] == LOST, rank))[0]
    kind = Problem if failed[worst] == 2 else LaunchError
    return kind(
        f"{what}: rank {worst} of {num_ranks}", _cause(failed[worst]), "ended it, so all ranks were ended",
        "see its last lines above; a trainer that is started again goes on from its newest checkpoint",
    )  # fmt: skip


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
