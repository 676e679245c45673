"""A trial: one episode that is played against the policies of a door and never trained. Plain JSON, as the rest.

| request                        | body -> reply             |
|--------------------------------|---------------------------|
| POST /swarm/trials             | TrialRequest -> PlayLease |
| POST /swarm/trials/{id}/finish | TrialEnd -> Trial         |

A trial ends by itself after its `timeout_s`; then 404.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from astraflow.types import Outcome
from astraflow.wire.messages import Label


class TrialRequest(msgspec.Struct, kw_only=True):
    """Play one row of a source of the run."""

    row: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    source: Label = ""  # empty: that of [evaluation], else the first training source
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None  # 0: greedy; None: as in training


class TrialEnd(msgspec.Struct, kw_only=True):
    """It was played. One of them is given."""

    outcome: Outcome | None = None
    error: Annotated[str, msgspec.Meta(max_length=4096)] | None = None  # "<kind>: <message>"


class Span(msgspec.Struct):
    """Neighbouring tokens of one origin."""

    sampled: bool  # False: they were given to the policy
    text: str  # special tokens included
    token_ids: list[int]
    versions: tuple[int, int] | None  # oldest and newest weights that sampled them


class TrialBranch(msgspec.Struct, kw_only=True):
    """One token sequence, as it would be trained: its own tokens, after `fork_at` tokens of its parent."""

    policy: str
    branch: int
    parent_branch: int  # -1: none
    fork_at: int
    reward: float | None  # None: unscored
    rewards_per_call: tuple[float, ...]
    spans: list[Span]


class Trial(msgspec.Struct, kw_only=True):
    """What became of it."""

    error: str | None  # None: it ran to its end
    branches: list[TrialBranch]  # of a failed one, what was captured until then
    metrics: dict[str, float]
    wall_s: float
    num_calls: dict[str, int]  # policy -> answered calls
