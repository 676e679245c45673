"""What can happen to the dataflow machine, what it answers, and what it asks the shell to do.

Commands are what the journal keeps: replayed over the last snapshot they give the same state. They never depend on a
clock other than the `now` that is kept beside them (seconds of run time, never running backwards).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from astraflow.dataflow.machine.records import EpisodeCommit, Failed, Put
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


class ReturnEpisodes(msgspec.Struct, frozen=True, tag=True):
    """A node gives leases back, and stays: (episode id, attempt, whether that counts as lost)."""

    node_id: str
    leases: list[tuple[str, int, bool]]


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


class LeaseRows(msgspec.Struct, frozen=True, tag=True):
    """A worker of a stage asks for entries with about `n` rows."""

    stage: str
    worker_id: str
    request_id: str
    n: int


class EntryColumns(msgspec.Struct, frozen=True, array_like=True):
    """What a stage made of one entry, or why it is refused."""

    entry_id: str
    attempt: int
    rows: list[int]  # row numbers within the put, one per row of the entry
    reward: float | None = None  # of a stage that adds "reward"; None: unscored
    problem: str = ""  # "<reason>: <sentence>": the lease goes back; "": the columns are good


class AddColumns(msgspec.Struct, frozen=True, tag=True):
    """A worker of a stage hands in columns, which lie at `put` (None: no entry has good ones)."""

    stage: str
    worker_id: str
    request_id: str
    put: Put | None
    entries: list[EntryColumns]


class LeaveStage(msgspec.Struct, frozen=True, tag=True):
    """A worker of a stage leaves; its leases are given back."""

    stage: str
    worker_id: str


class AckRows(msgspec.Struct, frozen=True, tag=True):
    """A consumer is done with the groups of a policy before number `position`."""

    consumer: str
    policy: str
    position: int


class Expire(msgspec.Struct, frozen=True, tag=True):
    """Time ran out for these; decided by `Machine.due`, so that a replay need not know who was heard of when."""

    nodes: list[str] = []
    leases: list[tuple[str, int]] = []  # (episode id, attempt)
    trainers: list[str] = []  # policies whose trainer is silent
    workers: list[tuple[str, str]] = []  # (stage, worker)
    rows: list[tuple[str, str, int]] = []  # (stage, entry id, attempt)


class DropDamaged(msgspec.Struct, frozen=True, tag=True):
    """Rows in these puts (`Put.key`) are not what was written."""

    puts: list[int]
    where: str  # for people


class Reopen(msgspec.Struct, frozen=True, tag=True):
    """The service started again on an existing journal: every deadline starts anew, a failed run may try again."""


class FailRun(msgspec.Struct, frozen=True, tag=True):
    """The run cannot go on, says the shell."""

    failed: Failed


class VoidCommand(msgspec.Struct, frozen=True, tag=True):
    """Command `seq` raised while it was applied: it changed nothing, and a replay leaves it out."""

    seq: int
    kind: str
    error: str


Command = (
    JoinNode | DrainNode | LeaseEpisodes | ReturnEpisodes | CommitEpisodes | ResumePolicy | TakeBatch | AckBatch
    | CoverBatches | LeaseRows | AddColumns | LeaveStage | AckRows | Expire | DropDamaged | Reopen | FailRun
    | VoidCommand
)  # fmt: skip


class Wake(msgspec.Struct, frozen=True):
    """Requests that wait for `topic` ("leases", a policy's name, "stages/<name>" or "consumers/<policy>") may find what
    they wait for."""

    topic: str


class DropSegment(msgspec.Struct, frozen=True):
    """No row of this segment is needed any more."""

    segment: int


class Cancel(msgspec.Struct, frozen=True):
    """A node no longer holds this lease; it hears so when its next heartbeat names it."""

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


class Happened(msgspec.Struct, frozen=True):
    """A moment in the life of a task, for its history (`views.life` says which there are)."""

    group_id: str
    what: str
    fields: dict[str, Any]


class Event(msgspec.Struct, frozen=True):
    """Something people may want to see at once.

    Kinds: step, eval, node_joined, node_died, node_left, trainer_resumed, trainer_silent, dropped,
    episodes_dropped, episode_error, stage_worker_died, stage_refused, alarm.
    """

    kind: str
    fields: dict[str, Any]


Instruction = Wake | DropSegment | Cancel | MetricsRow | Happened | Event


class BatchGrant(msgspec.Struct, frozen=True):
    """Reply to TakeBatch: the shell gathers the rows of `policy`'s batch of `step`."""

    policy: str
    step: int


class Refusal(AstraFlowError):
    """The machine refuses a command; its state is unchanged. `status` is the HTTP status to answer with, `reason` a
    word to count it by; "": the state of the run was against it, which is nobody's fault."""

    def __init__(self, status: int, message: str, kind: str = "DataflowError", *, reason: str = "") -> None:
        self.status, self.kind, self.reason = status, kind, reason
        super().__init__(message)
