"""The event loop, and blocking functions beside it, each on a daemon thread of its own.

A pool's threads are joined when the interpreter ends, so one that hangs would keep the process; these never do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


def start_in_thread(function: Callable[[], R], name: str) -> tuple[threading.Thread, asyncio.Future[R]]:
    """The thread and the future of what it returns or raises. Cancelling the future does not stop the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # R may be None

    def body() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        except BaseException as error:  # SystemExit in user code ends its episode, not the thread alone
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread, future


async def in_thread(function: Callable[[], R], name: str) -> R:
    """What `function` returns, without blocking the loop."""
    _, future = start_in_thread(function, name)
    return await future


def run_loop(coroutine: Coroutine[Any, Any, R]) -> R:
    """`asyncio.run`, on uvloop where it is installed (some platforms have none)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)
