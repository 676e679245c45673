"""How slowly bytes may come, and how long stores may fail, until a fetch says that it cannot go on.

```
 no byte           the reader asks again after the timeout of its client (30 s), TRIES times      route.TRIES
 a few bytes       fewer than MIN_BYTES_PER_S over five such times: the store has failed          Pace
 fewer than that   of FLOOR_BYTES_PER_S over one such time, and another store was not tried       Pace, SlowStore
 store by store    none is asked any more once others have failed for FAILING_S                   client.py
```
So a fetch to which nothing comes ends within 600 s, however many stores there are (`test_stalls.py` turns the clock).
"""

from __future__ import annotations

import math
import time

from astraflow.errors import WeightError
from astraflow.weights.fetch.route import TRIES

SILENT_S = 30.0
"""A request without a byte for so long has failed, by default."""

MIN_BYTES_PER_S = 250.0
"""A quarter of the slowest link that is served, 1 kB/s."""

FLOOR_BYTES_PER_S = 10_000.0
"""A store from which less comes is left for the next one."""

MAX_DOCUMENT_BYTES = 256 << 20
"""Of a manifest, listing or index: what is read in one piece."""

FAILING_S = 180.0


class SlowStore(WeightError):
    """Bytes come, but so few that other stores are tried first."""


class Pace:
    """Of one thing on its way, over all tries; looks at the rate once per window. What it raises ends the request.

    Without it one byte per timeout would hold a reader for ever, as each one is progress.
    """

    def __init__(self, thing: str, timeout_s: float, *, leave: bool = False, most: float = math.inf) -> None:
        """`thing`: for the error. `timeout_s`: of the client, without a byte. `leave`: another store was not tried yet.
        `most`: bytes; more are nonsense."""
        self._thing, self._leave, self._most = thing, leave, most
        self._bytes_per_s = FLOOR_BYTES_PER_S if leave else MIN_BYTES_PER_S
        self._window_s = timeout_s if leave else (TRIES + 1) * timeout_s
        self._since, self._now, self._before = math.nan, 0, 0

    def came(self, num_bytes: int) -> None:
        """So many more bytes. Raises: SlowStore, WeightError."""
        self._now += num_bytes
        if self._now > self._most:
            raise WeightError(
                self._thing, f"{self._now} bytes", f"must have {self._most:.0f} at most", "ask another store"
            )
        self.look()

    def look(self) -> None:
        """The first look begins the first window. Raises: SlowStore, WeightError."""
        now = time.monotonic()
        if math.isnan(self._since):
            self._since = now
        seconds = now - self._since
        if seconds < self._window_s:
            return
        if self._now - self._before < self._bytes_per_s * seconds:
            kind, more = (SlowStore, " and another store is there") if self._leave else (WeightError, "")
            raise kind(
                self._thing, f"{self._now} bytes",
                f"comes with fewer than {self._bytes_per_s:g} bytes/s in {seconds:.0f} s{more}", "check the connection",
            )  # fmt: skip
        self._since, self._before = now, self._now
