"""Which past versions of a policy a node serves for a copy of it: those evenly apart, the newest so many. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from astraflow.types import WeightVersion


@dataclass(frozen=True)
class Past:
    """One of the `keep` engines of a copy. Version `n * every` is served by engine `n % keep`, so that each new one
    takes the place of the oldest, and all nodes hold the same ones, also those that came late."""

    every: int
    keep: int
    engine: int

    def of(self, newest: WeightVersion) -> WeightVersion | None:
        """What the engine serves once there is `newest`; None: there are too few versions yet."""
        number = newest.version // self.every
        number -= (number - self.engine) % self.keep
        return msgspec.structs.replace(newest, version=number * self.every) if number >= 0 else None
