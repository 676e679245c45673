"""Publishing off the trainer's step: a snapshot is encoded and written by a thread of its own.

```
 step ─► snapshot ─submit─► [one waits] ─► encode against the snapshot before, write, make visible
           the next step goes on at once; only a whole step behind does submit wait
```
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from astraflow.weights.files.build import Base
from astraflow.weights.store import FileStore


class Publisher:
    """Versions of one store, in the order in which they are given. `deltas`: changes only, where they are few."""

    def __init__(self, store: FileStore, *, deltas: bool = True) -> None:
        self.store = store
        self._deltas = deltas
        self._base: Base | None = None  # the last one that was published; only the thread touches it
        self._thread = ThreadPoolExecutor(1, f"publish-{store.policy}")
        self._running: list[Future[None]] = []
        self._lock = threading.Lock()
        self.seconds = 0.0  # of work in the thread; only grows

    def submit(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> float:
        """Publish soon; returns the seconds that the caller had to wait because two versions were still under way.

        Args: tensors: Hugging Face name -> torch tensor; they must not change any more.
        Raises: WeightError: of an earlier version that could not be published.
        """
        begin = time.perf_counter()
        with self._lock:
            while len(self._running) > 1:
                self._running.pop(0).result()
            self._running = [future for future in self._running if not (future.done() and future.result() is None)]
            self._running.append(self._thread.submit(self._publish, version, tensors, tuple(files)))
        return time.perf_counter() - begin

    def flush(self) -> None:
        """All that was submitted is visible. Raises: WeightError: it could not be published."""
        with self._lock:
            while self._running:
                self._running.pop(0).result()

    def close(self) -> None:
        """Finish what was submitted, whatever becomes of it, and end the thread."""
        self._thread.shutdown(wait=True)

    def _publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path]) -> None:
        begin = time.perf_counter()
        base, self._base = self._base, None
        content = self.store.publish(version, tensors, files, keep_existing=True, base=base)
        if self._deltas:
            self._base = Base(version, tensors, {entry.name: entry.xxh3 for entry in content.tensors})
        self.seconds += time.perf_counter() - begin
