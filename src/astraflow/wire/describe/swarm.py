"""Requests of a swarm door beside the calls of agents, as its OpenAPI says. A test holds them equal to the routes."""

from __future__ import annotations

from functools import cache
from typing import Any

from astraflow.wire.describe.openapi import Operation, document
from astraflow.wire.messages import Ok
from astraflow.wire.swarm import messages as m
from astraflow.wire.swarm import trials as t

_BODY = (400, 413, 415, 422)
_OF_EPISODE = (*_BODY, 404, 409, 410)

OPERATIONS = (
    Operation(
        method="POST", path="/swarm/leases", name="leases", sender="client", body=m.PlaysRequest, reply=m.PlaysReply,
        about="Up to count episodes to play; waits up to wait_s for the first", refusals=(*_BODY, 410, 503),
    ),
    Operation(
        method="POST", path="/swarm/heartbeat", name="heartbeat", sender="client", body=m.Playing,
        reply=m.PlayingReply, about="I live, and play these; the reply says which of them I need not play any more",
        refusals=(*_BODY, 410),
    ),
    Operation(
        method="POST", path="/swarm/episodes/{episode_id:path}/finish", name="finish", sender="client", body=m.Finish,
        reply=m.FinishReply, about="The episode ran to its end, with this reward", refusals=_OF_EPISODE,
    ),
    Operation(
        method="POST", path="/swarm/episodes/{episode_id:path}/fail", name="fail", sender="client", body=m.Fail,
        reply=m.FinishReply, about="The episode failed: kept as an error", refusals=_OF_EPISODE,
    ),
    Operation(
        method="POST", path="/swarm/episodes/{episode_id:path}/abort", name="abort", sender="client", body=m.Abort,
        reply=Ok, about="Give the episode back: nothing is kept, it is offered again at once", refusals=_OF_EPISODE,
    ),
    Operation(
        method="POST", path="/swarm/trials", name="trial", sender="anyone", body=t.TrialRequest, reply=m.PlayLease,
        about="Try a workflow on a task: played and captured as any episode, never trained",
        refusals=(*_BODY, 404, 409, 503),
    ),
    Operation(
        method="POST", path="/swarm/trials/{trial_id}/finish", name="finish_trial", sender="anyone", body=t.TrialEnd,
        reply=t.Trial, about="It was played: what was captured", refusals=(*_BODY, 404),
    ),
    Operation(
        method="GET", path="/swarm/status", name="status", sender="anyone", reply=m.SwarmStatus,
        about="Clients, what they play, and how episodes ended",
    ),
    Operation(
        method="GET", path="/swarm/openapi.json", name="openapi", sender="anyone", reply="application/json",
        about="This document",
    ),
)  # fmt: skip


@cache
def swarm_document() -> dict[str, Any]:
    """OpenAPI of a swarm door."""
    return document(
        "AstraFlow swarm",
        "Clients lease episodes, play them with any LLM client (base_url and api_key of the lease, on the same port), "
        "and hand them in. Bodies are plain JSON and need no header but content-type. The rules beyond shapes are in "
        "docs/protocol.md.",
        OPERATIONS,
        bare=True,
    )
