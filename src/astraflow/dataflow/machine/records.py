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

import re
from functools import lru_cache
from typing import Any

import msgspec

from astraflow.estimates import TaskMeans
from astraflow.types import Purpose

_SIBLING = re.compile(r"0|[1-9][0-9]{0,8}")


def split_id(name: str) -> tuple[str, int]:
    """ "<group>/<sibling>" -> group, sibling. -1: not a number as this service writes it, so nothing has this name."""
    group, _, sibling = name.rpartition("/")
    return group, _number(sibling)


@lru_cache(1 << 12)
def _number(sibling: str) -> int:
    return int(sibling) if _SIBLING.fullmatch(sibling) else -1


class Put(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the body of one commit lies: `segments/<segment>.arrow[offset : offset + length]`."""

    segment: int
    offset: int  # < 2**32
    length: int  # bytes, > 0
    sum: int = 0  # xxh3 of the body, 64 bits; 0: not known

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
    num_calls: int = 0  # as many as the largest `call_index` or `rewards_per_call` says
    engine: str = ""  # "<engine>@<node>" that sampled it; "": not known

    @property
    def min_version(self) -> int:
        """Oldest version among all sampled tokens; -1: none sampled."""
        versions = self.min_versions
        return versions[0] if len(versions) == 1 else min((v for v in versions if v >= 0), default=-1)


class EpisodeCommit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One finished episode as the machine sees it; the tokens stay in the segment."""

    episode_id: str
    attempt: int
    error: str | None  # "<kind>: <message>": unscored
    metrics: dict[str, float]
    parts: list[Part]  # at most one per policy
    code: str = ""  # version of the code that played it; "": not known


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
    sibling: int = 0  # number of the episode within its group


class QueuedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A complete group of one policy that passed its operators."""

    group_id: str
    weight: float
    min_version: int  # oldest version among all sampled tokens of the group
    entries: list[Entry]


class Batch(msgspec.Struct):
    """The groups of one step of one policy; kept until a checkpoint covers it."""

    step: int
    groups: list[QueuedGroup]  # as served; those that are trained again come first
    metrics: dict[str, float]
    acked: bool = False
    holder: str = ""  # trainer that got it, for /status; "": none, or one that fell silent. It binds nobody
    num_replayed: int = 0  # how many of `groups` are trained again
    originals: list[QueuedGroup] = []  # fresh groups as they were before `on_batch`; empty: as they are served


class Rest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is left of a group whose other episodes are part of an earlier batch; it goes first into the next one."""

    group: QueuedGroup
    num_entries: int  # of the whole group


class StoredGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A trained group that an operator retains, to be trained again."""

    group: QueuedGroup
    step: int  # when it was trained last
    uses: int  # how often it was trained, >= 1


class PolicyState(msgspec.Struct):
    """One policy: its trainer, its queue, its batches, its account."""

    trainer_id: str = ""  # "": no trainer has called resume yet
    urls: tuple[str, ...] = ()
    version: int = -1  # of the current trainer
    latest: int = -1  # newest acknowledged version; -1: version 0 is not published
    covered: int = 0  # newest checkpoint
    queue: dict[int, QueuedGroup] = {}  # arrival -> group; `serving.waiting` keeps them in order
    num_arrived: int = 0
    queue_episodes: int = 0  # of the groups in `queue`
    queue_tokens: int = 0  # sampled ones, of the groups in `queue`
    rest: Rest | None = None  # of the group that the last batch cut; only with batch.episodes
    batches: dict[int, Batch] = {}  # step -> batch, in order of steps
    recent: list[tuple[float, int]] = []  # last batches: fresh groups (see `serving.pacing`), groups trained again
    stored: dict[str, StoredGroup] = {}  # group id -> trained group that may be trained again
    selected: list[str] = []  # of `stored`: what the next batch trains again
    owed: int = 0  # groups that operators have selected so far less those of them that were part of a batch again
    num_replayed: int = 0  # groups trained again, each time; no part of the accounting law
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    num_dropped: int = 0
    dropped_episodes: dict[str, int] = {}  # episodes with rows, of groups that were not dropped
    equal_before: int = 0  # dropped by zero_variance when the last batch was formed
    dropped_in_row: int = 0  # since the last batch was formed
    failed_in_row: int = 0  # of those, groups whose episodes failed or had no reward
    operators: list[dict[str, Any]] = []  # operator states, filled for a snapshot
    waited: dict[str, float] = {}  # seconds by what it did or waited for, see `serving.balance`

    @property
    def in_flight(self) -> int:
        """Groups admitted and neither trained nor dropped."""
        return self.admitted - self.trained - self.num_dropped

    @property
    def num_waiting(self) -> int:
        """Groups that wait for a batch, the rest of a cut one included."""
        return len(self.queue) + (self.rest is not None)


class NodeState(msgspec.Struct):
    """A rollout node in the pool."""

    name: str
    capacity: int
    host: str
    held: dict[str, int] = {}  # episode id -> attempt
    last_request: str = ""
    last_leases: list[str] = []  # episode ids given for `last_request`


class CodeAccount(msgspec.Struct, array_like=True):
    """What became of the episodes that one version of the workflow's code played."""

    episodes: int = 0
    failed: int = 0
    scored: int = 0  # rewards of training episodes, one per policy
    reward_sum: float = 0.0


class EngineAccount(msgspec.Struct, array_like=True):
    """What one engine of one node sampled."""

    episodes: int = 0  # once per policy that it served
    tokens: int = 0  # sampled
    scored: int = 0  # rewards of training episodes
    reward_sum: float = 0.0


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
    avg: TaskMeans = msgspec.field(default_factory=TaskMeans)  # success of tasks with scored episodes
    passes: dict[int, TaskMeans] = {}  # k -> pass@k of tasks with at least k scored episodes
    min_version: int = -1  # among sampled tokens; -1: none yet
    max_version: int = -1
    started_s: float = 0.0


class StagedEntry(msgspec.Struct, array_like=True):
    """One entry of a group that waits for stages. Dicts are keyed by stage and hold those that are not done with it."""

    part: Part  # with the reward that a stage gave it
    left: list[str]  # stages that are not done with it, in an order that fits what they need of each other
    added: list[Added] = []
    attempts: dict[str, int] = {}  # newest attempt; absent: never leased
    losses: dict[str, int] = {}  # attempts that ended without columns
    holders: dict[str, str] = {}  # worker that holds the lease


class StagedGroup(msgspec.Struct, array_like=True):
    """A complete group of one policy that waits for stages; one of `closed` and `queued` is set."""

    policy: str
    group_id: str
    seq: int  # order of arrival
    min_version: int  # oldest version among all sampled tokens
    entries: dict[int, StagedEntry]  # by sibling
    closed: OpenGroup | None = None  # before the operators: its episodes, with the parts of this policy only
    queued: QueuedGroup | None = None  # after the operators


class StageWorker(msgspec.Struct):
    """A worker of a stage that holds leases, or did a moment ago."""

    held: dict[str, int] = {}  # entry id -> attempt
    last_lease: str = ""  # request id
    last_given: list[str] = []  # entry ids given for it
    last_push: str = ""  # request id
    last_results: dict[str, str] = {}  # what was answered to it


class StageState(msgspec.Struct):
    """One stage: what waits for it, who works, its account in entries."""

    pending: list[tuple[int, int, str]] = []  # heap of (oldest version, arrival of the group, entry id)
    workers: dict[str, StageWorker] = {}
    num_done: int = 0
    num_lost: int = 0  # leases that ran out or came back refused
    refused: dict[str, int] = {}  # reason -> entries
    last_problem: str = ""  # why an attempt ended without columns, in words


class ConsumerLog(msgspec.Struct):
    """The groups of one policy that entered its queue, while a consumer needs them."""

    first: int = 0  # number of `groups[0]`, counted from the start of the run
    groups: list[QueuedGroup] = []

    @property
    def end(self) -> int:
        """Number of the next group."""
        return self.first + len(self.groups)


class ConsumerState(msgspec.Struct):
    """Where one consumer stands."""

    positions: dict[str, int] = {}  # policy -> number of the first group that it has not acknowledged
    missed: dict[str, int] = {}  # policy -> groups that were forgotten before it acknowledged them


class Failed(msgspec.Struct, frozen=True):
    """Why the run cannot go on: the parts of a `Problem` and the name of its class."""

    kind: str
    thing: str
    value: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.thing}={self.value} {self.rule}; {self.fix}"


class SourceState(msgspec.Struct):
    """One training source: its cursor, its turn in the mix, and what became of its rows."""

    epoch: int = 0
    position: int = 0  # within the shuffle of the epoch
    credit: float = 0.0  # picks that the mix owes it; negative: it was picked ahead of its share
    admitted: int = 0  # tasks
    in_flight: int = 0  # of those, neither trained nor dropped
    skipped: dict[str, int] = {}  # operator -> rows that it refused; they were never admitted
    barren: int = 0  # rows refused in a row, weighted, see `admission.gate`
    asleep: str = ""  # operator for which it gives no task until `State.news` changes; "": it may give one
    seen: int = -1  # `State.news` when its operators were last asked
    operators: list[dict[str, Any]] = []  # operator states, filled for a snapshot


class State(msgspec.Struct):
    """Everything that survives a restart."""

    policies: dict[str, PolicyState]
    nodes: dict[str, NodeState] = {}
    groups: dict[str, OpenGroup] = {}
    pending: list[tuple[int, int, str]] = []  # heap of (admission order, sibling, group id): waiting for a node
    eval_pending: list[tuple[int, int, str]] = []
    tasks: dict[str, TaskAccount] = {}  # group id -> account, while in flight
    sources: dict[str, SourceState] = {}  # training sources
    num_results: int = 0  # complete groups, once per policy, that operators of sources were told of
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
    codes: dict[str, CodeAccount] = {}  # version of the code -> its episodes, the one that was committed last is last
    engines: dict[str, EngineAccount] = {}  # "<engine>@<node>" -> what it sampled; the last one that did is last
    looked_at: float = 0.0  # when `serving.balance` was last told the time
    voids: dict[str, int] = {}  # kind of command -> those that raised while they were applied
    failure: Failed | None = None
    staged: dict[str, StagedGroup] = {}  # "<policy>/<group id>" -> a group that waits for stages
    num_staged: int = 0  # so far, gives `StagedGroup.seq`
    stages: dict[str, StageState] = {}
    logs: dict[str, ConsumerLog] = {}  # policy -> what its consumers read
    consumers: dict[str, ConsumerState] = {}

    @property
    def news(self) -> int:
        """Grows whenever something happens that may change the mind of an operator of a source."""
        return self.num_results + self.admitted - len(self.tasks) + sum(p.latest for p in self.policies.values())

    @property
    def skipped(self) -> dict[str, dict[str, int]]:
        """Source -> operator -> rows that it refused."""
        return {name: source.skipped for name, source in self.sources.items() if source.skipped}
