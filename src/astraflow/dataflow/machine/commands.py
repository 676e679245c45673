"""What can happen to the dataflow machine, what it answers, and what it asks the shell to do.

Commands are what the journal keeps: replayed over the last snapshot they give the same state. They never depend on a
clock other than the `now` that is kept beside them (seconds of run time, never running backwards).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from astraflow.dataflow.machine.records import EpisodeCommit, Put
from astraflow.errors import AstraFlowError
from astraflow.wire import messages


class JoinNode(msgspec.Struct, frozen=True, tag=True):
    """A node enters the pool."""

    join: messages.Join


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """A node leaves; its leases are given back."""

    node_id: str


class LeaseEpisodes(msgspec.Struct, frozen=True, tag=True):
    """A node asks for up to `n` episodes."""

    node_id: str
    request_id: str
    n: int


class CommitEpisodes(msgspec.Struct, frozen=True, tag=True):
    """A node hands in episodes whose rows lie at `put` (None: no rows)."""

    node_id: str
    put: Put | None
    episodes: list[EpisodeCommit]


class ResumePolicy(msgspec.Struct, frozen=True, tag=True):
    """A trainer starts at a version."""

    policy: str
    resume: messages.Resume


class TakeBatch(msgspec.Struct, frozen=True, tag=True):
    """A trainer at `version` asks for the batch of the next step."""

    policy: str
    trainer_id: str
    version: int


class AckBatch(msgspec.Struct, frozen=True, tag=True):
    """A batch was trained."""

    policy: str
    batch_id: str
    ack: messages.Ack


class CoverBatches(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint is on disk."""

    policy: str
    checkpoint: messages.Checkpoint


class Expire(msgspec.Struct, frozen=True, tag=True):
    """Time ran out for these; decided by `Machine.due`, so that a replay need not know who was heard of when."""

    nodes: list[str] = []
    leases: list[tuple[str, int]] = []  # (episode id, attempt)
    trainers: list[str] = []  # policies whose trainer is silent


class Reopen(msgspec.Struct, frozen=True, tag=True):
    """The service started again on an existing journal: every deadline starts anew, a failed run may try again."""


Command = (
    JoinNode | DrainNode | LeaseEpisodes | CommitEpisodes | ResumePolicy | TakeBatch | AckBatch | CoverBatches | Expire
    | Reopen
)  # fmt: skip


class Wake(msgspec.Struct, frozen=True):
    """Requests that wait for `topic` ("leases", or a policy's name) may find what they wait for."""

    topic: str


class DropSegment(msgspec.Struct, frozen=True):
    """No row of this segment is needed any more."""

    segment: int


class Cancel(msgspec.Struct, frozen=True):
    """The node should stop playing this attempt: its lease is no longer held."""

    node_id: str
    episode_id: str
    attempt: int


class MetricsRow(msgspec.Struct, frozen=True):
    """One row for metrics.jsonl: an acknowledged step or a finished evaluation round; unique by its first fields."""

    kind: Literal["step", "eval"]
    policy: str
    step: int
    time_s: float  # run time
    metrics: dict[str, float]


class Event(msgspec.Struct, frozen=True):
    """Something people may want to see at once.

    Kinds: step, eval, node_joined, node_died, node_left, trainer_resumed, trainer_silent, dropped, episode_error,
    alarm.
    """

    kind: str
    fields: dict[str, Any]


Instruction = Wake | DropSegment | Cancel | MetricsRow | Event


class BatchGrant(msgspec.Struct, frozen=True):
    """Reply to TakeBatch: the shell gathers the rows of `policy`'s batch of `step`."""

    policy: str
    step: int


class Refusal(AstraFlowError):
    """The machine refuses a command; its state is unchanged. `status` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str, kind: str = "DataflowError") -> None:
        self.status, self.kind = status, kind
        super().__init__(message)
