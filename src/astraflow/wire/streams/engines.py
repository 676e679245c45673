"""What one node asks the engines of another one.

| request                | body -> reply                                                                              |
|------------------------|--------------------------------------------------------------------------------------------|
| POST /engines/{policy} | Asked -> server-sent events: Pieces, then "[DONE]"; hanging up ends the generation         |
| GET  /engines          | -> Lent                                                                                    |

404: no such engine here (any more). Each token comes with the version that sampled it, as its engine says.
"""

from __future__ import annotations

import msgspec

from astraflow.types import FinishReason, Sampling


class Asked(msgspec.Struct, kw_only=True):
    """One generation, or what is left of one."""

    request_id: str  # "<episode id>/<attempt>/<policy>/<call>"
    number: int = 0  # which of the policy's engines there
    prompt_ids: list[int]
    sampling: Sampling
    hurry: bool = False  # each token as soon as it is there; else some at once


class Piece(msgspec.Struct):
    """More of a generation; lists of equal length."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    finish_reason: FinishReason | None = None  # in the last piece
    error: str | None = None  # why there is no more; in the last piece


class EngineState(msgspec.Struct):
    """One engine."""

    version: int  # in force; -1: none yet
    max_context: int
    running: float = 0.0
    waiting: float = 0.0


class Lent(msgspec.Struct):
    """The engines of a node that others may ask: policy -> its engines there, in order."""

    policies: dict[str, list[EngineState]]
