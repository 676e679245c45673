"""What every process of a run that lives long does to itself: the garbage collector, and how it is told to stop."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 50  # the defaults (700, 10, 10) rescan all modules of torch many times a second


def settle_memory() -> None:
    """Call once a process is built: what exists now stays, so collections look at newer objects only.

    Measured on a rollout node of the quickstart: the collector took 15 % of its CPU time before (docs/performance.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set; a second one interrupts. Outside the main thread: never set."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
