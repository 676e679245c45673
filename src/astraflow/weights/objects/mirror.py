"""The versions of a trainer in an object store too, copied by a thread of its own: no step waits for it.

```
 publisher ─► FileStore ──► mirror thread ──► object store ──► nodes and relays that reach only that
                                  └─ on_change: nodes are told of the store when it has the version
```
What is behind is no queue but a look at both stores: the thread copies what the newest version rests on, oldest first,
and looks again. A store that fails is tried again, for ever and less and less often.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from astraflow.errors import WeightError
from astraflow.weights.objects.bucket import Bucket
from astraflow.weights.objects.layout import store_url
from astraflow.weights.objects.writer import ObjectWriter
from astraflow.weights.plan import retained
from astraflow.weights.store import FileStore

log = logging.getLogger(__name__)
_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_LOOK_S = 0.05  # for a version that is announced and not published yet
_IDLE_S = 1.0
_JOIN_S = 5.0


class _Ended(Exception):
    """The mirror is closed while a version is on its way."""


class Mirror:
    """Follows `source` until it is closed. The counts only grow, but for `version`."""

    def __init__(self, source: FileStore, base: str, on_change: Callable[[Mirror], None] = lambda mirror: None) -> None:
        """`base`: URL of the run's folder in the object store; the versions lie below `<base>/<policy>`. `on_change`:
        called by the thread when a version came there, and when the store failed.

        Raises: WeightError: a package is missing for the scheme of the URL.
        """
        self.source, self._on_change = source, on_change
        self._base = f"{base.rstrip('/')}/{source.policy}"
        self._bucket = Bucket(self._base)
        self._writer = ObjectWriter(self._bucket, source.policy, keep=source.keep, pins=source.pins)
        self.version = -1  # newest that can be fetched there
        self.num_failures = self.num_skipped = self.nbytes = 0
        self._wanted = -1
        self._failing = False
        self._failure: BaseException | None = None
        self._news, self._closed = threading.Event(), threading.Event()
        self._settled = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"mirror-{source.policy}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """What is announced; "" before the store was reached."""
        return store_url(self._base, self._writer.store_id) if self._writer.store_id else ""

    @property
    def stats(self) -> dict[str, float]:
        """For the trainer's heartbeat."""
        newest = max(self._wanted, max(self.source.versions(), default=-1))
        return {
            "mirror_version": float(self.version), "mirror_behind": float(newest - self.version),
            "mirror_failures": float(self.num_failures), "mirror_skipped": float(self.num_skipped),
            "mirror_bytes": float(self.nbytes),
        }  # fmt: skip

    def announce(self, version: int) -> None:
        """This version is published, or soon will be. Raises: WeightError: the thread has ended."""
        self._check()
        self._wanted = max(self._wanted, version)
        self._news.set()

    def flush(self, seconds: float, stop: threading.Event | None = None) -> bool:
        """Wait until the newest version is there; False: not in time, `stop` was set, or the store fails.

        Raises: WeightError: the thread has ended, not by `close`.
        """
        deadline = time.monotonic() + seconds
        with self._settled:
            while not self._is_settled() and not self._failing and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed.is_set() or (stop is not None and stop.is_set()):
                    return False
                self._settled.wait(min(left, 0.2))
        self._check()
        return self._is_settled()

    def close(self) -> None:
        """End the thread; a version that is on its way stays half, and is removed by the next mirror."""
        self._closed.set()
        self._news.set()
        self._thread.join(_JOIN_S)  # a call of the scheme's library may hang; the thread ends with the process

    def _is_settled(self) -> bool:
        return self.version >= max(self._wanted, max(self.source.versions(), default=-1))

    def _check(self) -> None:
        if self._failure is not None:
            what = f"stopped with {type(self._failure).__name__}: {self._failure}"
            raise WeightError("weights.url", self._bucket.url, what, "start the trainer again") from self._failure

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # not of the store: handed to the thread that publishes, which ends
            with self._settled:
                self._failure = error
                self._settled.notify_all()

    def _follow(self) -> None:
        pause_s = _PAUSE_S
        while not self._closed.is_set():
            try:
                self._go_on()
            except _Ended:
                return
            except (WeightError, OSError) as error:
                self._failed(error)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                pause_s = _PAUSE_S

    def _go_on(self) -> None:
        """One version, or a wait for the next."""
        if not self._writer.store_id:
            self._writer.open(self.source)
            self._came(max(self._writer.versions, default=-1))
        version = self._next()
        if version is None:
            self._news.wait(_LOOK_S if self._wanted > self.version else _IDLE_S)
            self._news.clear()
            return
        before = self.version
        self._writer.add(self.source, version, self._count)
        if before >= 0:
            self.num_skipped += sum(v not in self._writer.versions for v in range(before + 1, version))
        self._came(max(version, before))
        self._writer.retire(version)

    def _next(self) -> int | None:
        """The oldest of what the newest version rests on, and of what always stays, that is not there yet."""
        infos = self.source.infos()
        needed = retained(infos, 1, pins=self.source.pins) - set(self._writer.versions)
        return min(needed, default=None)

    def _came(self, version: int) -> None:
        if self._failing:
            log.info("%s answers again, after %d failures", self._bucket.url, self.num_failures)
        with self._settled:
            self.version, self._failing = version, False
            self._settled.notify_all()
        self._on_change(self)

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        level = logging.DEBUG if self._failing else logging.WARNING
        log.log(level, "weights.url: %s; the run goes on, and the store is tried again", error)
        with self._settled:
            self._failing = True
            self._settled.notify_all()
        self._on_change(self)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._closed.is_set():
            raise _Ended
