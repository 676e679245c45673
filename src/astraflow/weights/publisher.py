"""Publishing off the trainer's step: a snapshot is encoded and written by a thread of its own.

```
 step ─► snapshot ─submit─► [one waits] ─► encode against the snapshot before, write, make visible
           the next step goes on at once; only a whole step behind does submit wait
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from astraflow.weights.files.build import Base
from astraflow.weights.store import FileStore


class Backlog:
    """Work off the step, done by one thread in the order in which it is given."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._running: list[Future[None]] = []
        self._lock = threading.Lock()
        self.seconds = 0.0  # of work in the thread; only grows

    def add(self, work: Callable[[], None]) -> float:
        """Do it soon; returns the seconds that the caller had to wait because two were still under way.

        Raises: what earlier work ended with. This one is done all the same.
        """
        begin = time.perf_counter()
        with self._lock:
            waits = len(self._running) > 1
            ended = [self._running.pop(0)] if waits else [future for future in self._running if future.done()]
            failure = next((error for future in ended if (error := future.exception()) is not None), None)
            self._running = [future for future in self._running if future not in ended]
            self._running.append(self._thread.submit(self._do, work))
        if failure is not None:
            raise failure
        return time.perf_counter() - begin

    def flush(self) -> None:
        """All that was given is done. Raises: what it ended with."""
        with self._lock:
            while self._running:
                self._running.pop(0).result()

    def close(self) -> None:
        """Finish what was given, whatever becomes of it, and end the thread."""
        self._thread.shutdown(wait=True)

    def _do(self, work: Callable[[], None]) -> None:
        begin = time.perf_counter()
        try:
            work()
        finally:
            self.seconds += time.perf_counter() - begin


class Publisher:
    """Versions of one store, in the order in which they are given. `deltas`: changes only, where they are few."""

    def __init__(self, store: FileStore, *, deltas: bool = True) -> None:
        self.store = store
        self._deltas = deltas
        self._base: Base | None = None  # the last one that was published; only the thread touches it
        self._backlog = Backlog(f"publish-{store.policy}")

    @property
    def seconds(self) -> float:
        """Of work in the thread; only grows."""
        return self._backlog.seconds

    def submit(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> float:
        """Publish soon; returns the seconds that the caller had to wait because two versions were still under way.

        Args: tensors: Hugging Face name -> torch tensor; they must not change any more.
        Raises: WeightError: of an earlier version that could not be published.
        """
        files = tuple(files)
        return self._backlog.add(lambda: self._publish(version, tensors, files))

    def flush(self) -> None:
        """All that was submitted is visible. Raises: WeightError: it could not be published."""
        self._backlog.flush()

    def close(self) -> None:
        """Finish what was submitted, whatever becomes of it, and end the thread."""
        self._backlog.close()

    def _publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path]) -> None:
        base, self._base = self._base, None
        content = self.store.publish(version, tensors, files, keep_existing=True, base=base)
        if self._deltas:
            self._base = Base(version, tensors, {entry.name: entry.xxh3 for entry in content.tensors})
