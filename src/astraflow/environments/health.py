"""How environments fare: counts and times, as one line now and then."""

from __future__ import annotations

import logging
import time
from collections import deque

log = logging.getLogger("astraflow.environment")
PERIOD_S = 30.0
_KEPT = 2048  # newest steps


class Health:
    """Counts of the environments of one workflow in one worker process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts = self.live = self.failures = self.timeouts = self.steps = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._said = time.monotonic()
        self._slow_said = False

    def started(self) -> None:
        """One more environment."""
        self.starts += 1
        self.live += 1

    def ended(self) -> None:
        """One is closed."""
        self.live -= 1

    def stepped(self, seconds: float) -> None:
        """A step (or reset) was made."""
        self.steps += 1
        self._seconds.append(seconds)
        if time.monotonic() - self._said > PERIOD_S:
            self._said = time.monotonic()
            log.info("environment %s: %s", self.name, self.line())

    def failed(self) -> None:
        """A step raised."""
        self.failures += 1

    def late(self) -> None:
        """A step missed its deadline."""
        self.timeouts += 1

    def slow(self, what: str, seconds: float) -> None:
        """A step held up the event loop; said once."""
        if not self._slow_said:
            self._slow_said = True
            log.warning(
                "environment %s: %s took %.0f ms, in which no other episode of its worker went on; set its "
                "runs to 'cpu', or make it a coroutine function", self.name, what, 1e3 * seconds,
            )  # fmt: skip

    def line(self) -> str:
        """starts, live, steps, failures, timeouts, and milliseconds of the newest steps."""
        spent = sorted(self._seconds)
        p50, p99 = (1e3 * spent[int(q * (len(spent) - 1))] if spent else 0.0 for q in (0.5, 0.99))
        counts = f"starts {self.starts}, live {self.live}, steps {self.steps}"
        return f"{counts}, failures {self.failures}, timeouts {self.timeouts}, p50_ms {p50:.3g}, p99_ms {p99:.3g}"
