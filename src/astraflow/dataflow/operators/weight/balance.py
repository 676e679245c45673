"""A loss weight per source, so that sources with short answers are not drowned by long ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from astraflow.contracts import Operator
from astraflow.dataflow.operators.scored import require
from astraflow.types import Group


class Balance(Operator):
    """Multiplies the weight of each group of source s by `w_s = (p_s / sum p) * (U / u_s)`.

    `u_s` is how much of the batch is of source s, counted in units `by`; U is the sum over sources; `p_s` is the share
    that s should have. So source s has exactly its share of the batch, and the weights average to 1 over its units.
    Args: by: "tokens" (sampled ones), which is right for a loss with aggregation "token"; "groups" for "sequence".
    share: "groups": as many groups as it has in the batch, whatever their length; "sources": the same for each.
    smooth: `u_s / groups of s` is a moving mean over batches, `m = smooth * m + (1 - smooth) * now`, for batches that
        have few groups of a source; weights are then scaled to average to 1 again. State: one number per source.
    """

    phase = "weight"
    makes = ("balanced",)

    def __init__(
        self,
        *,
        by: Literal["tokens", "groups"] = "tokens",
        share: Literal["groups", "sources"] = "groups",
        smooth: float = 0.0,
    ) -> None:
        require(by in ("tokens", "groups"), "balance.by", by, "must be tokens or groups", "use tokens")
        require(share in ("groups", "sources"), "balance.share", share, "must be groups or sources", "use groups")
        require(
            (by, share) != ("groups", "groups"), "balance.by", by, "changes nothing with share = 'groups'",
            "use by = 'tokens', or share = 'sources'",
        )  # fmt: skip
        require(0 <= smooth < 1, "balance.smooth", smooth, "must be >= 0 and < 1", "use 0 for each batch on its own")
        require(smooth == 0 or by == "tokens", "balance.smooth", smooth, "changes nothing by groups", "use 0")
        self._by_tokens, self._equal, self._smooth = by == "tokens", share == "sources", smooth
        self._means: dict[str, float] = {}  # source -> moving mean of units per group

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        num: dict[str, int] = {}
        units: dict[str, float] = {}
        for group in groups:
            source = group.task.source
            num[source] = num.get(source, 0) + 1
            units[source] = units.get(source, 0.0) + (max(sum(group.num_tokens), 1) if self._by_tokens else 1)
        smoothed = {s: num[s] * self._mean(s, units[s] / num[s]) for s in num}
        raw = {s: (1 if self._equal else num[s]) / smoothed[s] for s in num}
        scale = sum(units.values()) / sum(raw[s] * units[s] for s in num) if num else 1.0
        for group in groups:
            group.weight *= raw[group.task.source] * scale

    def state_dict(self) -> dict[str, Any]:
        return dict(self._means)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = {source: float(mean) for source, mean in state.items()}

    def _mean(self, source: str, now: float) -> float:
        if not self._smooth:
            return now
        before = self._means.get(source, now)
        self._means[source] = self._smooth * before + (1 - self._smooth) * now
        return self._means[source]
