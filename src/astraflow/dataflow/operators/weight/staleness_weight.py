"""A loss weight that falls with staleness."""

from __future__ import annotations

from collections.abc import Sequence

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.types import Group


class StalenessWeight(Operator):
    """Multiplies the weight of a group by `max(decay ** staleness, floor)` when its batch is formed.

    Staleness is the trainer's version (`step - 1`) minus the oldest version among the group's sampled tokens.
    """

    phase = "weight"
    makes = ("staleness_weighted",)

    def __init__(self, *, decay: float = 0.9, floor: float = 0.0) -> None:
        require(0 < decay <= 1, "staleness_weight.decay", decay, "must be > 0 and <= 1", "use 0.9")
        require(0 <= floor <= 1, "staleness_weight.floor", floor, "must be 0 to 1", "use 0")
        self._decay, self._floor = decay, floor

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        for group in groups:
            oldest = min((v for v in group.min_version if v >= 0), default=step - 1)
            group.weight *= max(self._decay ** max(step - 1 - oldest, 0), self._floor)
