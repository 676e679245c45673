"""Snapshots beside the running service, and the segments that may go once one is behind their release.

```
 loop:    state as bytes ──► thread: two files, write-ahead log into the database ──► loop: forget commands, segments
```

A segment that nobody needs is deleted only when a snapshot contains its release, so that a replay of the log finds
every row that it found the first time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, KeysView
from concurrent.futures import Future, ThreadPoolExecutor

from astraflow.dataflow.journal.log import Journal
from astraflow.dataflow.journal.snapshots import Snapshot
from astraflow.dataflow.storage.segments import Segments
from astraflow.errors import JournalError

log = logging.getLogger("astraflow.dataflow")
MAX_WAITING_BYTES = 256 << 20  # of released segments: then a snapshot comes early
MAX_LOG_BYTES = 64 << 20  # of commands: the same
_RETRY_COMMANDS = 100  # after a snapshot that could not be written


class Compaction:
    """Of one journal.

    Args: snapshot_every: commands. needed: segments that are needed, kept up to date by the machine. on_crash: called
    with an error that is none of the disk's.
    """

    def __init__(
        self,
        journal: Journal,
        segments: Segments,
        snapshot_every: int,
        needed: KeysView[int],
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        self._journal, self._segments, self._every, self._on_crash = journal, segments, snapshot_every, on_crash
        self._needed = needed
        self._released: dict[int, tuple[int, int]] = {}  # segment -> (command of its newest release, bytes)
        self._retry_at = 0
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._ended = asyncio.Event()
        self.num_snapshots = self.num_failures = 0

    @property
    def due(self) -> bool:
        """A snapshot should begin now."""
        num = self._journal.num_since_snapshot
        if self._running is not None or num < max(1, self._retry_at):
            return False
        return num >= self._every or self._journal.num_bytes > MAX_LOG_BYTES or self.waiting_bytes > MAX_WAITING_BYTES

    @property
    def waiting_bytes(self) -> int:
        """Of segments that nobody needs and that are still there."""
        return sum(size for _, size in self._released.values())

    def postpone(self) -> None:
        """Not now; ask again after some commands."""
        self._retry_at = self._journal.num_since_snapshot + _RETRY_COMMANDS

    def release(self, segment: int) -> None:
        """Nobody needs this segment any more, says the command applied now."""
        self._released[segment] = (self._journal.seq, self._segments.size(segment))

    def begin(self, state: bytes, now: float) -> None:
        """Start a snapshot of `state`, which contains every command so far."""
        loop = asyncio.get_running_loop()
        snapshot = self._journal.begin_snapshot(state, now)
        self._running = self._thread.submit(self._journal.compact, snapshot)
        self._running.add_done_callback(lambda job: _call(loop, self._end, snapshot, job))

    async def ended(self) -> None:
        """Until no snapshot is being written."""
        while self._running is not None:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        """Wait for a snapshot that is being written."""
        self._thread.shutdown(wait=True)
        self._running = None

    def _end(self, snapshot: Snapshot, job: Future[None]) -> None:
        if job is not self._running:  # closed meanwhile
            return
        self._running = None
        self._ended.set()
        try:
            job.result()
            self._journal.end_snapshot(snapshot)
        except JournalError as error:  # the log is intact; try again later
            log.error("%s", error)
            self.num_failures += 1
            self.postpone()
            return
        except Exception as error:
            self._on_crash("snapshot", error)
            return
        self._retry_at = 0
        self.num_snapshots += 1
        self._drop_segments(snapshot.seq)

    def _drop_segments(self, seq: int) -> None:
        """Delete full segments that nobody has needed since command `seq`, or ever."""
        for segment in self._segments.sealed.difference(self._needed):
            if self._released.get(segment, (0, 0))[0] <= seq:
                self._segments.drop(segment)
                self._released.pop(segment, None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """On the loop, unless it has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)
