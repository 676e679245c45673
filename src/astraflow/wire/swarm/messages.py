"""The swarm protocol: what a node and the clients that play its episodes say to each other. Plain JSON over HTTP.

| request                          | body -> reply                 | blocks up to wait_s for |
|----------------------------------|-------------------------------|-------------------------|
| POST /swarm/leases               | PlaysRequest -> PlaysReply    | an episode to play      |
| POST /swarm/heartbeat            | Playing -> PlayingReply       | -                       |
| POST /swarm/episodes/{id}/finish | Finish -> FinishReply         | -                       |
| POST /swarm/episodes/{id}/fail   | Fail -> FinishReply           | -                       |
| POST /swarm/episodes/{id}/abort  | Abort -> Ok                   | -                       |
| GET  /swarm/status               | -> SwarmStatus                | -                       |

The calls of an episode go to `base_url` with its `api_key`, on the same port. All requests may be sent again: a lease
request by its `request_id`, the others by episode and attempt. An attempt is alive while its client's heartbeats name
it or its key is used; after `dead_after_s` without either it is given back and offered again as the next attempt.

Errors: any status >= 400 carries `Failure`. 401 token, 404 unknown episode, 409 not yours or over (says how it ended),
410 the run is over, 415 no JSON, 422 malformed: the episode goes on, send it again as it should be.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from astraflow.types import Purpose, Task
from astraflow.wire.messages import Id, Label, Number

MAX_COUNT = 1024  # of one lease request
MAX_WAIT_S = 300.0
Attempt = Annotated[int, msgspec.Meta(ge=1)]
Code = Annotated[str, msgspec.Meta(max_length=64)]
Ending = Literal["done", "failed", "aborted", "given_back", "cancelled", "timeout"]


class PlaysRequest(msgspec.Struct, kw_only=True):
    """Up to `count` episodes, waiting at most `wait_s` for the first."""

    client: Id  # unique per process start
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] = 1
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 20.0  # 0: only what waits at the door already
    request_id: Annotated[str, msgspec.Meta(max_length=256)] = (
        ""  # a repeated one gets what is held of the same; "": none
    )
    sources: Annotated[list[Id], msgspec.Meta(max_length=256)] = []  # that the client can play; empty: all
    name: Label = ""  # for people
    version: Label = ""  # of the client's software, for people
    code: Code = ""  # of the workflow that will play them


class PlayLease(msgspec.Struct, kw_only=True):
    """The right to play one episode. Its calls go to `base_url` with `api_key`, as to any OpenAI endpoint."""

    episode_id: str
    attempt: int
    task: Task
    purpose: Purpose  # "eval": a held-out task, played as any other
    timeout_s: float  # from now on; then the episode is over, an error
    base_url: str  # ends with /v1; its host is the one that the request was sent to
    api_key: str  # of this episode only
    policies: list[str]  # what `model` may be, and whom rewards may be for


class PlaysReply(msgspec.Struct, kw_only=True):
    """Episodes to play; empty when none came in time."""

    leases: list[PlayLease]
    heartbeat_s: float  # how often to say what is played
    dead_after_s: float  # silence after which an episode is given back


class Playing(msgspec.Struct, kw_only=True):
    """I live, and play these."""

    client: Id
    playing: list[tuple[Id, Attempt]] = []  # (episode id, attempt)
    name: Label = ""
    version: Label = ""
    code: Code = ""


class PlayingReply(msgspec.Struct):
    """What need not be played any more."""

    cancelled: list[tuple[str, int]] = []  # of `playing`: given back, cancelled or over
    heartbeat_s: float = 0.0


class Finish(msgspec.Struct, kw_only=True):
    """The episode ran to its end. One of `reward`, `rewards` and `rewards_per_call` is needed."""

    client: Id
    attempt: Attempt
    reward: Number | msgspec.UnsetType | None = msgspec.UNSET  # for all policies; null: unscored, in no baseline
    rewards: dict[str, Number | None] | msgspec.UnsetType = msgspec.UNSET  # one for each policy that is named
    rewards_per_call: dict[str, list[Number]] | list[Number] | msgspec.UnsetType = (
        msgspec.UNSET
    )  # by policy; a list: of the only one
    metrics: dict[str, Number] = {}  # "success" is shown in reports
    code: Code = ""  # of the workflow that played it


class Fail(msgspec.Struct, kw_only=True):
    """The episode failed: it is kept as an error, never as a reward of zero."""

    client: Id
    attempt: Attempt
    error: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]  # "<kind>: <message>" is counted by its kind
    code: Code = ""


class Abort(msgspec.Struct, kw_only=True):
    """I do not play it: nothing of it is kept, and it is offered again at once."""

    client: Id
    attempt: Attempt


class FinishReply(msgspec.Struct, kw_only=True):
    """The episode is on its way to the dataflow service."""

    result: Literal["accepted", "duplicate"]  # "duplicate": the same was said before
    error: str | None = None  # None: with its reward; else the error that it is kept with


class ClientStatus(msgspec.Struct, kw_only=True):
    """One client, for people. Counts are of episodes since the node started."""

    client: str
    name: str
    version: str
    code: str
    silent_s: float  # since its last request
    playing: int
    endings: dict[str, int]  # ending -> episodes


class SwarmStatus(msgspec.Struct, kw_only=True):
    """What a door sees."""

    clients: list[ClientStatus]
    playing: int
    waiting: dict[str, int]  # source -> leased episodes that no client has asked for yet
    asked: int  # episodes that clients wait for
    endings: dict[str, int]
    policies: list[str]  # that episodes may call
    codes: dict[str, int]  # code version -> finished or failed episodes
