"""What the dataflow machine remembers: plain mutable records, and nothing else survives a restart.

```
 source row ─► OpenGroup ─(all episodes done, operators)─► QueuedGroup ─► Batch ─(acked, checkpointed)─► gone
                 │ one per admitted task                     one per policy   retained until a checkpoint covers it
                 └ EpisodeCommit per finished episode, pointing at rows of a put in a segment file
```

The snapshot of the journal is this tree as JSON. Liveness (who was heard of when) is deliberately not part of it, see
`dataflow.machine.liveness`. Records that there are many of are JSON arrays, and hidden from the cyclic garbage
collector (they hold no cycles), which would else walk through all of them again and again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from astraflow.types import Purpose


class Put(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the body of one commit lies: `segments/<segment>.arrow[offset : offset + length]`."""

    segment: int
    offset: int  # < 2**32
    length: int  # bytes, > 0

    @property
    def key(self) -> int:
        """One number for `(segment, offset)`."""
        return self.segment << 32 | self.offset


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One policy's share of one committed episode: its rows and what the machine needs to know of them."""

    policy: str
    put: int  # `Put.key`
    rows: list[int]  # row numbers within the put, one per branch
    min_versions: list[int]  # per row: oldest version among sampled tokens; -1: none sampled
    max_version: int  # newest version among all sampled tokens; -1: none sampled
    num_tokens: int  # sampled tokens of all rows
    num_truncated: int  # rows cut by a length limit
    reward: float | None  # None: unscored
    rewards_per_call: tuple[float, ...] = ()

    @property
    def min_version(self) -> int:
        """Oldest version among all sampled tokens; -1: none sampled."""
        return min((v for v in self.min_versions if v >= 0), default=-1)


class EpisodeCommit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One finished episode as the machine sees it; the tokens stay in the segment."""

    episode_id: str
    attempt: int
    error: str | None  # "<kind>: <message>": unscored
    metrics: dict[str, float]
    parts: list[Part]  # at most one per policy


class OpenGroup(msgspec.Struct, array_like=True):
    """An admitted task whose episodes are being played. Lists have one entry per sibling."""

    group_id: str
    source: str
    row: int
    epoch: int
    seq: int  # order of admission
    purpose: Purpose
    attempts: list[int]  # current attempt; 0: never leased
    losses: list[int]  # attempts that were lost (lease ran out, node died)
    holders: list[str | None]  # node that holds the lease; None: waiting, or done
    results: list[EpisodeCommit | None]  # None: not done
    num_open: int  # siblings that are not done


class Added(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The columns that one stage added to the rows of one entry; they lie in a put of their own."""

    stage: str
    put: int  # `Put.key`
    rows: list[int]  # row numbers within the put, one per row of the part


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One scored episode of a group that waits for, or is part of, a batch."""

    part: Part
    advantage: float
    success: float  # 0..1
    call_advantages: tuple[float, ...] = ()  # one per call where credit is per call; replaces `advantage`
    added: list[Added] = []  # what stages added, in the order of arrival


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A complete group of one policy that passed its operators."""

    group_id: str
    weight: float
    min_version: int  # oldest version among all sampled tokens of the group
    entries: list[Entry]


class Batch(msgspec.Struct):
    """The groups of one step of one policy; kept until a checkpoint covers it."""

    step: int
    groups: list[QueuedGroup]
    metrics: dict[str, float]
    acked: bool = False
    holder: str = ""  # trainer that got it, for /status; "": none, or one that fell silent. It binds nobody


class PolicyState(msgspec.Struct):
    """One policy: its trainer, its queue, its batches, its account."""

    trainer_id: str = ""  # "": no trainer has called resume yet
    urls: tuple[str, ...] = ()
    version: int = -1  # of the current trainer
    latest: int = -1  # newest acknowledged version; -1: version 0 is not published
    covered: int = 0  # newest checkpoint
    queue: list[tuple[int, int, QueuedGroup]] = []  # heap of (oldest version, arrival, group)
    num_arrived: int = 0
    batches: dict[int, Batch] = {}  # step -> batch, in order of steps
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    num_dropped: int = 0
    dropped_in_row: int = 0  # since the last batch was formed
    failed_in_row: int = 0  # of those, groups whose episodes failed or had no reward
    operators: list[dict[str, Any]] = []  # operator states, filled for a snapshot

    @property
    def in_flight(self) -> int:
        """Groups admitted and neither trained nor dropped."""
        return self.admitted - self.trained - self.num_dropped


class NodeState(msgspec.Struct):
    """A rollout node in the pool."""

    name: str
    capacity: int
    host: str
    held: dict[str, int] = {}  # episode id -> attempt
    last_request: str = ""
    last_leases: list[str] = []  # episode ids given for `last_request`


class TaskAccount(msgspec.Struct, array_like=True):
    """What became of one admitted task over all policies."""

    open_policies: list[str]  # admitted for, and neither trained nor dropped yet
    trained: bool = False


class EvalRound(msgspec.Struct):
    """One evaluation round; groups of it are opened lazily and folded into these sums when they complete."""

    version: int
    num_tasks: int
    next_task: int = 0  # tasks from here on are not opened yet
    num_done: int = 0  # tasks
    num_episodes: int = 0  # done, failed ones included
    num_scored: int = 0
    num_failed: int = 0
    reward_sum: float = 0.0
    success_sum: float = 0.0  # over scored episodes
    passed: int = 0  # tasks with at least one success
    min_version: int = -1  # among sampled tokens; -1: none yet
    max_version: int = -1
    started_s: float = 0.0


class Failed(msgspec.Struct, frozen=True):
    """Why the run cannot go on: the parts of a `Problem` and the name of its class."""

    kind: str
    thing: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.thing}={self.value} {self.rule}; {self.fix}"


class State(msgspec.Struct):
    """Everything that survives a restart."""

    policies: dict[str, PolicyState]
    nodes: dict[str, NodeState] = {}
    groups: dict[str, OpenGroup] = {}
    pending: list[tuple[int, int, str]] = []  # heap of (admission order, sibling, group id): waiting for a node
    eval_pending: list[tuple[int, int, str]] = []
    tasks: dict[str, TaskAccount] = {}  # group id -> account, while in flight
    epoch: int = 0  # source cursor
    position: int = 0
    num_groups: int = 0  # opened so far, gives `OpenGroup.seq`
    puts: dict[int, Put] = {}  # `Put.key` -> where, while referenced
    put_refs: dict[int, int] = {}  # `Put.key` -> parts that need it
    segment_puts: dict[int, int] = {}  # segment -> puts that need it
    recent: dict[str, list[int]] = {}  # closed groups -> accepted attempt per sibling (0: none), newest last
    rounds: list[EvalRound] = []  # open, oldest first
    results: list[dict[str, float]] = []  # closed rounds
    next_round: int = 0  # version of the next round; -1: none is left
    eval_turn: bool = True  # a reply of one lease alternates between evaluation and training
    admitted: int = 0  # tasks, over all policies
    trained: int = 0
    dropped: dict[str, int] = {}
    num_episodes: int = 0  # committed
    num_refused: int = 0
    num_lost: int = 0  # leases that ran out or died with their node
    errors: dict[str, int] = {}  # kind -> committed episodes with such an error
    first_errors: dict[str, str] = {}  # kind -> the first such error, shortened
    failure: Failed | None = None
