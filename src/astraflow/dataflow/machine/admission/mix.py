"""From which training source the next task comes: shares of [mix], kept exactly instead of by luck.

At each pick every source that can give a task earns its share of it, and the source that is picked pays 1. Picked is,
among those with credit, the one whose credit would be the first to reach 1 (the earliest deadline). For constant shares
each count is then always within 1 of its share of all picks so far, whatever the shares (Tijdeman's chairman
assignment; P-fair scheduling, Baruah et al. 1996). So any window of n picks holds n times the share within 2, and
within 1 with two sources (for three and more, no rule can promise 1 for every window). A share that moves counts as it
was at each pick, so the totals follow its integral.

A source that cannot give a task now earns nothing and the others share its picks, so it neither stalls them nor comes
back with a burst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from astraflow.dataflow.machine.plan import MixPlan
from astraflow.dataflow.machine.records import SourceState

_TINY = 1e-9  # credits are sums of shares; what rounding leaves is no credit


def shares(mix: MixPlan, step: int) -> dict[str, float]:
    """Share of each source at `step`, adding up to 1. Example: ratios 3 and 1 -> 0.75 and 0.25."""
    x = min(max(step, 0) / mix.steps, 1.0)
    if mix.schedule == "cosine":
        x = (1.0 - math.cos(math.pi * x)) / 2.0
    ratios = {name: start + (end - start) * x for name, (start, end) in mix.ratios.items()}
    total = sum(ratios.values())
    return {name: ratio / total for name, ratio in ratios.items()}


def pick(sources: dict[str, SourceState], share: dict[str, float], able: Sequence[str]) -> str:
    """The source among `able` whose turn it is; all of them have a share > 0. Changes nothing."""
    total = sum(share[name] for name in able)

    def turn(name: str) -> tuple[bool, float]:
        part = share[name] / total
        credit = sources[name].credit + part
        return credit <= _TINY, (1.0 - credit) / part

    return min(able, key=turn)


def pay(sources: dict[str, SourceState], share: dict[str, float], able: Sequence[str], picked: str) -> None:
    """`picked` gave a task: all of `able` earn their share of the pick, and it pays for it."""
    total = sum(share[name] for name in able)
    for name in able:
        sources[name].credit += share[name] / total
    sources[picked].credit -= 1.0
