"""The event loop: tasks that must not die in silence, and blocking functions, each on a daemon thread of its own.

A pool's threads are joined when the interpreter ends, so one that hangs would keep the process; these never do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from astraflow.errors import AstraFlowError

R = TypeVar("R")
log = logging.getLogger("astraflow.node")
_CANCEL_S = 5.0  # for tasks to end once they are cancelled


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


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them returns; the others are cancelled. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


class Guarded:
    """Background tasks that must not die in silence: the first that fails ends all, by name."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: tuple[str, BaseException] | None = None
        self._wake = asyncio.Event()

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task; from now on its failure is the owner's."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    async def run(self, main: Coroutine[Any, Any, Any], over: asyncio.Event) -> None:
        """Until `main` returns or `over` is set; then every task is cancelled.

        Raises: AstraFlowError: what a task died of; any other error as one that names the task.
        """
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        loop.set_exception_handler(self._on_callback_error)
        for task in (self.spawn("main", main), self.spawn("end", over.wait())):
            task.add_done_callback(lambda _: self._wake.set())
        try:
            await self._wake.wait()
        finally:
            loop.set_exception_handler(handler)
            await self._cancel_all()
        if self._failure is None:
            return
        name, error = self._failure
        if isinstance(error, AstraFlowError):
            log.error("the %s of %s ended: %s", name, self._owner, error)
            raise error
        log.error("the %s of %s ended: %s", name, self._owner, error, exc_info=error)
        raise AstraFlowError(
            f"task={name!r} of {self._owner} died of {type(error).__name__}: {error}; see the traceback in its log"
        ) from error

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(task.get_name(), error)

    def _on_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            log.warning("event loop: %s", context.get("message"))
        else:
            self._fail(f"callback ({context.get('message')})", error)

    def _fail(self, name: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (name, error)
        self._wake.set()


def run_loop(coroutine: Coroutine[Any, Any, R]) -> R:
    """`asyncio.run`, on uvloop where it is installed (some platforms have none)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)
