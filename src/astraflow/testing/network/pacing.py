"""When bytes leave and arrive on a shaped link. Pure: the caller brings the clock, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from astraflow.errors import LaunchError

BURST_S = 0.02
"""A sender that woke too late may catch up with this much of the line's time; more is lost, as on a real line."""

_MIN_PIECE, _MAX_PIECE = 256, 1 << 16


@dataclass(frozen=True)
class Conditions:
    """A link. Each direction has the whole bandwidth; the delay is one way, so a round trip takes it twice."""

    bits_per_s: float = 0.0  # 0: as fast as this host
    delay_s: float = 0.0
    window_bytes: int = 6 << 20  # of one connection and direction under way and not taken: Linux's largest window

    def __post_init__(self) -> None:
        for name, value in (("bits_per_s", self.bits_per_s), ("delay_s", self.delay_s)):
            if not 0 <= value < math.inf:
                raise LaunchError(f"link.{name}", value, "must be a number >= 0", "give 0 for no limit")
        if self.window_bytes < 1:
            raise LaunchError("link.window_bytes", self.window_bytes, "must be >= 1", "leave it out")


class Bucket:
    """A line that sends one byte after the other. `bits_per_s` may be changed at any time; 0: no limit."""

    def __init__(self, bits_per_s: float) -> None:
        self.bits_per_s = bits_per_s
        self._free_at = -math.inf

    def reserve(self, num_bytes: int, now: float) -> float:
        """The moment at which the last of so many bytes has left, behind all that was reserved before."""
        if not self.bits_per_s:
            return now
        self._free_at = max(self._free_at, now - BURST_S) + 8 * num_bytes / self.bits_per_s
        return max(self._free_at, now)


def piece_bytes(*bits_per_s: float) -> int:
    """How much is sent at once over lines in a row: about 5 ms of the slowest, so that connections take turns."""
    slowest = min((rate for rate in bits_per_s if rate), default=math.inf)
    return int(min(max(slowest / 8 * 0.005, _MIN_PIECE), _MAX_PIECE))
