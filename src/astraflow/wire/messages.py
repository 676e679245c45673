"""Every control message of the data interface, in one place: who sends it, who answers, what absence means.

JSON on the wire (msgspec). Bulk rows travel as Arrow IPC streams whose schema metadata carries the header struct
(`wire.codec`). All requests are idempotent by the ids in them. Times are durations in seconds: clocks of two hosts
are never compared.

| request                            | sender  | body -> reply                            | blocks up to wait_s for |
|------------------------------------|---------|------------------------------------------|-------------------------|
| GET  /run                          | any     | -> RunReply                              | -                       |
| POST /nodes                        | node    | Join -> JoinReply                        | -                       |
| POST /nodes/{id}/heartbeat         | node    | Heartbeat -> HeartbeatReply              | -                       |
| POST /nodes/{id}/returns           | node    | Returned -> Ok                           | -                       |
| DELETE /nodes/{id}                 | node    | -> Ok (drain: leases are given back)     | -                       |
| POST /leases                       | node    | LeaseRequest -> LeaseReply               | an admissible episode   |
| POST /episodes                     | node    | Arrow(EpisodesHeader) -> EpisodesReply   | -                       |
| POST /policies/{p}/resume          | trainer | Resume -> ResumeReply                    | -                       |
| POST /policies/{p}/heartbeat       | trainer | TrainerHeartbeat -> Ok                   | -                       |
| POST /policies/{p}/batches         | trainer | BatchRequest -> Arrow(BatchHeader) / 204 | a full batch            |
| POST /policies/{p}/batches/{b}/ack | trainer | Ack -> Ok                                | -                       |
| POST /policies/{p}/checkpoints     | trainer | Checkpoint -> Ok                         | -                       |
| POST /stages/{s}/leases            | stage   | StageRequest -> Arrow(StageRows)         | rows that wait for it   |
| POST /stages/{s}/columns           | stage   | Arrow(ColumnsHeader) -> ColumnsReply     | -                       |
| DELETE /stages/{s}/workers/{id}    | stage   | -> Ok (leave: leases are given back)     | -                       |
| POST /consumers/{c}/batches        | reader  | ConsumerRequest -> Arrow(ConsumerHeader) | a group it has not read |
| POST /consumers/{c}/ack            | reader  | ConsumerAck -> Ok                        | -                       |
| POST /relays/{id}                  | relay   | Relay -> RelayReply                      | -                       |
| GET  /sources/{s}/rows/{n}         | node    | -> Task                                  | -                       |
| GET  /status /metrics /events      | people  | -> JSON / Prometheus text / SSE          | -                       |

Errors: any status >= 400 carries `Failure`. 401 token, 404 unknown id, 409 refused by state, 410 the run is over,
422 malformed, 426 protocol mismatch, 503 the service stops (a request that waits), 507 journal cannot be written.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from astraflow.types import EpisodeLease, WeightVersion

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # kept, journaled and shown
Code = Annotated[str, msgspec.Meta(max_length=64)]  # kept and journaled, a label of a metric
Label = Annotated[str, msgspec.Meta(max_length=256)]  # for people
Note = Annotated[str, msgspec.Meta(max_length=8192)]
_LARGEST = 3.4028234663852886e38  # of float32
Number = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]  # of what is summed up
PROTOCOL = 1
PROTOCOL_HEADER = "x-astraflow-protocol"


class Ok(msgspec.Struct):
    """Done (or was already done: all requests are idempotent)."""

    ok: bool = True


class Failure(msgspec.Struct):
    """Any error reply: one sentence `<thing>=<value> <rule>; <fix>` and the name of the error class."""

    error: str
    kind: str = "WireError"


class RunReply(msgspec.Struct):
    """What a service started by hand needs to know of the run."""

    run: str  # name
    run_id: str  # unique per run directory; a node or trainer of another run is refused
    config: dict[str, Any]  # the resolved run file
    finished: bool = False


class Join(msgspec.Struct, kw_only=True):
    """A node enters the pool. Joining again with the same id is a no-op."""

    node_id: Id  # unique per process start
    name: Label
    capacity: int  # episodes it can play at once
    run_id: Id
    host: Label = ""


class Offer(msgspec.Struct, frozen=True):
    """Engines of a policy on a node, which other nodes may ask (`wire.streams.engines`)."""

    url: Id
    host: Label  # as in Join
    engine: Label  # "<engine>@<node>"


class JoinReply(msgspec.Struct):
    """How often to call, and the weights to fetch first."""

    heartbeat_s: float
    versions: dict[str, WeightVersion]


class Heartbeat(msgspec.Struct, kw_only=True):
    """I live: extends all my leases. A node unknown to the service gets 404 and joins again."""

    stats: dict[str, float] = {}  # gauges and monotonic counters for status and metrics
    versions: dict[str, int] = {}  # policy -> version in force on the node
    playing: list[tuple[Id, int]] = []  # (episode id, attempt) of all that the node plays or will play
    notes: dict[Label, Note] = {}  # for people: "code" (version in force), "edit" (why the newest is not)
    offers: dict[Id, Offer] = {}  # policy -> its engines here, for others
    lacks: list[Id] = []  # policies that have no engine here: who offers one?


class HeartbeatReply(msgspec.Struct):
    """What changed since."""

    versions: dict[str, WeightVersion]
    cancelled: list[tuple[str, int]] = []  # of `playing`: no longer held; stop playing this attempt, not a later one
    finished: bool = False  # the run is over: leave
    offers: dict[str, list[Offer]] = {}  # of each of `lacks`, by all other nodes


class Relay(msgspec.Struct, kw_only=True):
    """I serve weights at `url`: nodes are told of me until I am silent for `dataflow.dead_after_s`."""

    run_id: Id
    url: Id  # policies lie below it as `<url>/weights/<policy>`
    known: dict[str, int] = {}  # policy -> newest version that I was told of
    holds: dict[str, str] = {}  # policy of which I have versions -> the trainer (`RelayReply.trainers`) whose they are
    wait_s: float = 0.0  # the answer may wait so long for a newer one


class RelayReply(msgspec.Struct):
    """What there is to relay."""

    heartbeat_s: float
    versions: dict[str, WeightVersion]  # without this relay
    finished: bool = False
    trainers: dict[str, str] = {}  # policy -> id of the trainer that announced it; a new process has a new one


class LeaseRequest(msgspec.Struct, kw_only=True):
    """Up to `n` episodes, waiting at most `wait_s` for the first."""

    node_id: Id
    request_id: Id  # new for each request; a repeated request gets the same leases, as far as they are still held
    n: int
    wait_s: float = 0.0


class LeaseReply(msgspec.Struct):
    """Episodes to play; empty when none could be admitted in time."""

    leases: list[EpisodeLease]
    versions: dict[str, WeightVersion]
    finished: bool = False


class Returned(msgspec.Struct):
    """I will not play these: offer them again. Leases that are not mine (any more) are ignored."""

    leases: list[tuple[Id, int, bool]]  # (episode id, attempt, whether that counts towards workflow.max_attempts)


class EpisodeHeader(msgspec.Struct, kw_only=True):
    """Episode-level facts of one commit; its trajectories are the rows with the same episode_id."""

    episode_id: Id
    attempt: int
    num_rows: int  # rows of this episode, contiguous, in the order of the headers
    error: str | None = None  # None: ran to its end
    metrics: dict[str, Number] = {}
    wall_s: float = 0.0
    code: Code = ""  # version of the code that played it; "": not known
    engines: dict[Id, Label] = {}  # of policies that another engine sampled than EpisodesHeader says


class NextLeases(msgspec.Struct):
    """Beside a commit: up to `n` episodes to play next, those that there are at once. As LeaseRequest otherwise."""

    request_id: Id  # as in LeaseRequest
    n: int


class EpisodesHeader(msgspec.Struct):
    """Header of POST /episodes: several episodes in one request, each atomic on its own."""

    node_id: Id
    episodes: list[EpisodeHeader]
    engines: dict[Id, Label] = {}  # policy -> engine of the node that sampled it, "<engine>@<node>"; absent: not known
    next: NextLeases | None = None  # None: no more leases are asked for


class EpisodesReply(msgspec.Struct):
    """What became of each episode; the other fields are as in LeaseReply, and empty unless `next` was asked."""

    results: dict[str, str]  # episode id -> "accepted", "duplicate" (already committed), or "refused: <why>"
    leases: list[EpisodeLease] = []
    versions: dict[str, WeightVersion] = {}
    finished: bool = False


class Resume(msgspec.Struct, kw_only=True):
    """A trainer starts (or starts again) at a version: everything trained after it will be served again."""

    trainer_id: Id  # unique per process start; takes over from an older trainer of the policy
    version: int  # version of the loaded checkpoint; 0 on a fresh start
    urls: tuple[Annotated[str, msgspec.Meta(max_length=4096)], ...]  # weight stores of the policy
    run_id: Id


class ResumeReply(msgspec.Struct):
    """What comes next."""

    replayed_batches: int  # batches that will be served again
    latest: int  # newest version the service knows


class TrainerHeartbeat(msgspec.Struct, kw_only=True):
    """I live: without it `dataflow.batch_lease_s` long, the trainer is reported as silent.

    `stores`: weight stores that get each version after it is announced, with the newest that each of them has. Nodes
    are told of one while it has the newest version.
    """

    trainer_id: Id
    stats: dict[str, float] = {}
    stores: Annotated[dict[Annotated[str, msgspec.Meta(max_length=4096)], int], msgspec.Meta(max_length=16)] = {}


class BatchRequest(msgspec.Struct, kw_only=True):
    """The batch that follows `version`; asking again for the same version gives the same batch.

    With several data-parallel ranks each asks for its share, all with the same `trainer_id` and `version`; rank 0
    alone resumes, acknowledges and reports checkpoints. The others may ask before it has acknowledged, and wait.
    """

    trainer_id: Id
    version: int  # the trainer's version now
    wait_s: float = 0.0
    rank: int = 0  # 0 <= rank < ranks
    ranks: int = 1


class Ack(msgspec.Struct, kw_only=True):
    """The batch was trained and `version` was published. Acknowledging again is a no-op."""

    trainer_id: Id
    version: int
    metrics: dict[str, float] = {}  # of the step, slash names


class Checkpoint(msgspec.Struct, kw_only=True):
    """A checkpoint of `version` is on disk: batches up to it need not be kept."""

    trainer_id: Id
    version: int


class StageRequest(msgspec.Struct, kw_only=True):
    """Entries with about `n` rows, waiting at most `wait_s` for the first. Entry: all rows of one episode and policy.

    Any request extends all leases of the worker. `n = 0` only says that it lives.
    """

    worker_id: Id  # unique per process start
    request_id: Id  # new for each request; a repeated one gets the same leases, as far as they are still held
    n: int  # at most `stages.*.rows`; one entry is given even if it has more
    wait_s: float = 0.0
    stats: dict[str, float] = {}  # gauges and monotonic counters for status


class StageLease(msgspec.Struct, kw_only=True):
    """The right to add columns to the rows of one entry."""

    entry_id: str  # "<policy>/<group id>/<sibling>"
    attempt: int  # from 1; columns of an older attempt are refused
    num_rows: int  # contiguous, in the order of the leases
    fields: dict[str, Any] | None = None  # of the task; None: the stage does not need "task"


class StageRows(msgspec.Struct, kw_only=True):
    """Header of a reply to StageRequest; its rows have the columns that the stage needs, without "task"."""

    leases: list[StageLease]  # empty: nothing waited for the stage in time
    row_ids: list[str]  # "<entry id>:<number within it>", one per row
    lease_s: float  # silence after which the rows are offered to others
    versions: dict[str, WeightVersion]  # newest of each policy, and where its weights are
    finished: bool = False  # the run is over: leave


class ColumnsHeader(msgspec.Struct, kw_only=True):
    """Header of POST /stages/{s}/columns; its rows have the columns that the stage adds, and no other.

    An entry whose work failed has no rows and is named in `failed`: it is offered again.
    """

    worker_id: Id
    request_id: Id  # new for each request; a repeated one changes nothing
    leases: list[tuple[Id, int]]  # (entry id, attempt), in the order of the rows
    row_ids: list[str]  # as leased, one per row
    failed: list[tuple[Id, int, str]] = []  # (entry id, attempt, what went wrong)


class ColumnsReply(msgspec.Struct):
    """Per entry: "accepted", or "refused: <why>"; an entry that is refused is offered again."""

    results: dict[str, str]


class ConsumerRequest(msgspec.Struct, kw_only=True):
    """Up to `n` groups of a policy from the first that was not acknowledged; the same again until it is."""

    policy: Id
    n: int = 16
    wait_s: float = 0.0


class ConsumerHeader(msgspec.Struct, kw_only=True):
    """Header of a reply to ConsumerRequest; the rows are as in a batch, added columns included."""

    policy: str
    position: int  # number of the first group, counted from the start of the run
    next: int  # acknowledge this to go on behind the last group
    group_ids: list[str]  # in order; the rows of one put lie together, not those of one group
    missed: int  # groups of the policy that were forgotten before this consumer acknowledged them
    as_trained: bool  # False: operators of the policy change advantages or weights once more when a batch is formed
    finished: bool = False  # the run is over and these are its last groups


class ConsumerAck(msgspec.Struct, kw_only=True):
    """Everything before `position` has been read. Acknowledging again, or an earlier position, is a no-op."""

    policy: Id
    position: int
