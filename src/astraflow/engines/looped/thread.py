"""An event loop in a thread of its own, for objects that other threads call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

R = TypeVar("R")
_JOIN_S = 60.0


class LoopThread:
    """Runs from the start until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._gate = threading.Lock()  # between other threads and the end of the loop
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[..., object], *arguments: Any) -> bool:
        """`act` runs on the loop, after what was asked for before; False: the loop has stopped."""
        with self._gate:
            if self._loop.is_closed():
                return False
            self._loop.call_soon_threadsafe(act, *arguments)
            return True

    def wait_for(self, make: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """What the coroutine gives; for other threads only."""
        future: Future[R] = Future()

        def finish(task: asyncio.Task[R]) -> None:
            if (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        self.call(lambda: self._loop.create_task(make()).add_done_callback(finish))
        return future.result()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The loop ends after `last` and the end of all tasks, which it should have cancelled. A second call waits."""
        with self._gate:
            first, self._stopping = not self._stopping, True

        async def end() -> None:
            try:
                await last()
            finally:
                self._loop.call_soon(self._loop.stop)

        if first:
            self.call(lambda: self._loop.create_task(end()))
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            with self._gate:
                self._loop.close()
