"""Every control message of the data interface, in one place: who sends it, who answers, what absence means.

JSON on the wire (msgspec). Bulk rows travel as Arrow IPC streams whose schema metadata carries the header struct
(`wire.codec`). All requests are idempotent by the ids in them. Times are durations in seconds: clocks of two hosts
are never compared.

| request                            | sender  | body -> reply                            | blocks up to wait_s for |
|------------------------------------|---------|------------------------------------------|-------------------------|
| GET  /run                          | any     | -> RunReply                              | -                       |
| POST /nodes                        | node    | Join -> JoinReply                        | -                       |
| POST /nodes/{id}/heartbeat         | node    | Heartbeat -> HeartbeatReply              | -                       |
| DELETE /nodes/{id}                 | node    | -> Ok (drain: leases are given back)     | -                       |
| POST /leases                       | node    | LeaseRequest -> LeaseReply               | an admissible episode   |
| POST /episodes                     | node    | Arrow(EpisodesHeader) -> EpisodesReply   | -                       |
| POST /policies/{p}/resume          | trainer | Resume -> ResumeReply                    | -                       |
| POST /policies/{p}/heartbeat       | trainer | TrainerHeartbeat -> Ok                   | -                       |
| POST /policies/{p}/batches         | trainer | BatchRequest -> Arrow(BatchHeader) / 204 | a full batch            |
| POST /policies/{p}/batches/{b}/ack | trainer | Ack -> Ok                                | -                       |
| POST /policies/{p}/checkpoints     | trainer | Checkpoint -> Ok                         | -                       |
| GET  /status /metrics /events      | people  | -> JSON / Prometheus text / SSE          | -                       |

Errors: any status >= 400 carries `Failure`. 401 token, 404 unknown id, 409 refused by state, 410 the run is over,
422 malformed, 426 protocol mismatch, 507 journal cannot be written.
"""

from __future__ import annotations

from typing import Any

import msgspec

from astraflow.types import EpisodeLease, WeightVersion

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

    node_id: str  # unique per process start
    name: str
    capacity: int  # episodes it can play at once
    run_id: str
    host: str = ""  # for people


class JoinReply(msgspec.Struct):
    """How often to call, and the weights to fetch first."""

    heartbeat_s: float
    versions: dict[str, WeightVersion]


class Heartbeat(msgspec.Struct, kw_only=True):
    """I live: extends all my leases. A node unknown to the service gets 404 and joins again."""

    stats: dict[str, float] = {}  # gauges and monotonic counters for status and metrics
    versions: dict[str, int] = {}  # policy -> version in force on the node


class HeartbeatReply(msgspec.Struct):
    """What changed since."""

    versions: dict[str, WeightVersion]
    cancelled: list[tuple[str, int]] = []  # (episode id, attempt) no longer held: stop playing it, not a later attempt
    finished: bool = False  # the run is over: leave


class LeaseRequest(msgspec.Struct, kw_only=True):
    """Up to `n` episodes, waiting at most `wait_s` for the first."""

    node_id: str
    request_id: str  # a repeated request gets the same leases
    n: int
    wait_s: float = 0.0


class LeaseReply(msgspec.Struct):
    """Episodes to play; empty when none could be admitted in time."""

    leases: list[EpisodeLease]
    versions: dict[str, WeightVersion]
    finished: bool = False


class EpisodeHeader(msgspec.Struct, kw_only=True):
    """Episode-level facts of one commit; its trajectories are the rows with the same episode_id."""

    episode_id: str
    attempt: int
    num_rows: int  # rows of this episode, contiguous, in the order of the headers
    error: str | None = None  # None: ran to its end
    metrics: dict[str, float] = {}
    wall_s: float = 0.0


class EpisodesHeader(msgspec.Struct):
    """Header of POST /episodes: several episodes in one request, each atomic on its own."""

    node_id: str
    episodes: list[EpisodeHeader]


class EpisodesReply(msgspec.Struct):
    """Per episode: "accepted", "duplicate" (already committed), or "refused: <why>"."""

    results: dict[str, str]


class Resume(msgspec.Struct, kw_only=True):
    """A trainer starts (or starts again) at a version: everything trained after it will be served again."""

    trainer_id: str  # unique per process start; takes over from an older trainer of the policy
    version: int  # version of the loaded checkpoint; 0 on a fresh start
    urls: tuple[str, ...]  # weight stores of the policy
    run_id: str


class ResumeReply(msgspec.Struct):
    """What comes next."""

    replayed_batches: int  # batches that will be served again
    latest: int  # newest version the service knows


class TrainerHeartbeat(msgspec.Struct, kw_only=True):
    """I live: without it `dataflow.batch_lease_s` long, the trainer is reported as silent."""

    trainer_id: str
    stats: dict[str, float] = {}


class BatchRequest(msgspec.Struct, kw_only=True):
    """The batch that follows `version`; asking again for the same version gives the same batch."""

    trainer_id: str
    version: int  # the trainer's version now
    wait_s: float = 0.0


class Ack(msgspec.Struct, kw_only=True):
    """The batch was trained and `version` was published. Acknowledging again is a no-op."""

    trainer_id: str
    version: int
    metrics: dict[str, float] = {}  # of the step, slash names


class Checkpoint(msgspec.Struct, kw_only=True):
    """A checkpoint of `version` is on disk: batches up to it need not be kept."""

    trainer_id: str
    version: int
