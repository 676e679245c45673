"""From a model that was measured to larger ones: pure arithmetic, with its assumptions written out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from benchmarks.delta_codec import Measured

ASSUMPTIONS = (
    "bf16; parameter counts of Qwen3-1.7B, 8B and 14B, tied weights once.",
    "Upstream: an index of 4 bytes (8 where there are 2^32 elements or more) and 2 of value for each changed element; "
    "the share of changed elements is what its published bytes then mean.",
    "Ours: positions cost what evenly spread changes cost, differences what they cost in SmolLM2-135M, and both "
    "together as much above the entropy bound as there.",
    "At the measured share: the larger model changes as SmolLM2-135M did in its first 8 steps at that learning rate.",
)


class Model(NamedTuple):
    """One that upstream has published about, or nearly."""

    name: str
    parameters: int
    published_bytes: float | None  # upstream's delta of one step

    @property
    def upstream_each(self) -> int:
        """Bytes of upstream's coding for each changed element."""
        return 10 if self.parameters >= 1 << 32 else 6

    @property
    def upstream_share(self) -> float | None:
        """Share of changed elements that upstream's published bytes mean."""
        return self.published_bytes and self.published_bytes / self.upstream_each / self.parameters


MODELS = (
    Model("1.7B", 1_720_574_976, 95e6),
    Model("8B", 8_190_735_360, None),
    Model("14B", 14_768_307_200, 1.5e9),
)


def bytes_per_change(share: float, measured: Measured) -> float:
    """At another share of changed elements than was measured."""
    bound = measured.positions + measured.values
    overhead = measured.delta / bound
    return overhead * (position_bytes(share) + measured.values / measured.changed)


def position_bytes(share: float) -> float:
    """H(share) / share, in bytes: of one changed element among evenly spread ones."""
    return -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share / 8


def rows(name: str, measured: Measured) -> list[dict[str, Any]]:
    """One row for each model."""
    own = measured.changed / measured.elements
    made = []
    for model in MODELS:
        theirs = model.upstream_share
        share = theirs or own
        ours = model.parameters * share * bytes_per_change(share, measured)
        upstream = model.published_bytes or model.parameters * share * model.upstream_each
        made.append({
            "from": name, "model": model.name, "full GB": 2 * model.parameters / 1e9,
            "upstream MB (published)": model.published_bytes and model.published_bytes / 1e6,
            "share": share, "share is": "upstream's" if theirs else "measured",
            "upstream's coding MB": upstream / 1e6, "ours MB": ours / 1e6, "times smaller": upstream / ours,
            "ours MB at the measured share": model.parameters * own * bytes_per_change(own, measured) / 1e6,
        })  # fmt: skip
    return made
