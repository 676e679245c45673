"""Every request of the dataflow service, for its OpenAPI document. A test holds it equal to the routes."""

from __future__ import annotations

from functools import cache
from typing import Any

from astraflow.types import BatchHeader, Task
from astraflow.wire import messages as m
from astraflow.wire.codec import TRAINING_SCHEMA, TRAJECTORY_SCHEMA
from astraflow.wire.describe.openapi import Arrow, Operation, document

_BODY = (400, 413, 415, 422)
_BATCH_ROWS = "Rows of a batch; columns that stages added follow."

OPERATIONS = (
    Operation(
        method="GET", path="/run", name="run", sender="anyone", reply=m.RunReply,
        about="Name, id and settings of the run",
    ),
    Operation(
        method="POST", path="/nodes", name="join", sender="node", body=m.Join, reply=m.JoinReply,
        about="Enter the pool", refusals=(*_BODY, 409, 507),
    ),
    Operation(
        method="POST", path="/nodes/{node_id}/heartbeat", name="heartbeat", sender="node", body=m.Heartbeat,
        reply=m.HeartbeatReply, about="I live: extends all leases of the node", refusals=(*_BODY, 404),
    ),
    Operation(
        method="POST", path="/nodes/{node_id}/returns", name="returns", sender="node", body=m.Returned, reply=m.Ok,
        about="Give some leases back, and stay: they are offered again", refusals=(*_BODY, 404, 507),
    ),
    Operation(
        method="DELETE", path="/nodes/{node_id}", name="drain", sender="node", reply=m.Ok,
        about="Leave the pool: leases are given back", refusals=(422, 507),
    ),
    Operation(
        method="POST", path="/leases", name="lease", sender="node", body=m.LeaseRequest, reply=m.LeaseReply,
        about="Up to n episodes to play; waits up to wait_s for the first", refusals=(*_BODY, 404, 409, 503, 507),
    ),
    Operation(
        method="POST", path="/episodes", name="commit", sender="node", reply=m.EpisodesReply,
        body=Arrow(m.EpisodesHeader, TRAJECTORY_SCHEMA, "One row per branch; rows of an episode lie together."),
        about="Hand in whole episodes, each atomic", refusals=(*_BODY, 507),
    ),
    Operation(
        method="POST", path="/policies/{policy}/resume", name="resume", sender="trainer", body=m.Resume,
        reply=m.ResumeReply, about="I start at this version: serve again what was trained after it",
        refusals=(*_BODY, 404, 409, 507),
    ),
    Operation(
        method="POST", path="/policies/{policy}/heartbeat", name="trainer_heartbeat", sender="trainer",
        body=m.TrainerHeartbeat, reply=m.Ok, about="I live: extends the lease of the batch",
        refusals=(*_BODY, 404, 409),
    ),
    Operation(
        method="POST", path="/policies/{policy}/batches", name="batch", sender="trainer", body=m.BatchRequest,
        reply=Arrow(BatchHeader, TRAINING_SCHEMA, _BATCH_ROWS), empty="no batch was full within wait_s; ask again",
        about="The batch after a version; waits up to wait_s for it", refusals=(*_BODY, 404, 409, 410, 503, 507),
    ),
    Operation(
        method="POST", path="/policies/{policy}/batches/{batch_id:path}/ack", name="ack", sender="trainer",
        body=m.Ack, reply=m.Ok, about="The batch is trained and its version is published",
        refusals=(*_BODY, 404, 409, 507),
    ),
    Operation(
        method="POST", path="/policies/{policy}/checkpoints", name="checkpoint", sender="trainer", body=m.Checkpoint,
        reply=m.Ok, about="A checkpoint covers this version: older batches may go", refusals=(*_BODY, 404, 409, 507),
    ),
    Operation(
        method="POST", path="/stages/{stage}/leases", name="stage_lease", sender="stage", body=m.StageRequest,
        reply=Arrow(m.StageRows, None, "Its columns are those that the stage needs, without `task`."),
        about="Rows to work on; waits up to wait_s for the first", refusals=(*_BODY, 404, 409, 503, 507),
    ),
    Operation(
        method="POST", path="/stages/{stage}/columns", name="stage_columns", sender="stage", reply=m.ColumnsReply,
        body=Arrow(m.ColumnsHeader, None, "Its columns are those that the stage adds, and no other."),
        about="Hand in columns", refusals=(*_BODY, 404, 507),
    ),
    Operation(
        method="DELETE", path="/stages/{stage}/workers/{worker_id}", name="stage_leave", sender="stage", reply=m.Ok,
        about="Leave: leases are given back", refusals=(404, 422, 507),
    ),
    Operation(
        method="POST", path="/consumers/{consumer}/batches", name="consume", sender="consumer",
        body=m.ConsumerRequest, reply=Arrow(m.ConsumerHeader, TRAINING_SCHEMA, _BATCH_ROWS),
        about="Groups that went to training and were not read yet; waits up to wait_s for the first",
        refusals=(*_BODY, 404, 503),
    ),
    Operation(
        method="POST", path="/consumers/{consumer}/ack", name="consumer_ack", sender="consumer", body=m.ConsumerAck,
        reply=m.Ok, about="Everything before this position has been read", refusals=(*_BODY, 404, 409, 507),
    ),
    Operation(
        method="POST", path="/relays/{relay_id}", name="relay", sender="relay", body=m.Relay, reply=m.RelayReply,
        about="I serve weights: nodes are told of me while I say so", refusals=(*_BODY, 409, 503),
    ),
    Operation(
        method="GET", path="/sources/{source}/rows/{row:int}", name="row", sender="node", reply=Task,
        about="The task of one row, to try a workflow on it", refusals=(404,),
    ),
    Operation(
        method="GET", path="/status", name="status", sender="anyone", reply="application/json",
        about="What the run is doing",
    ),
    Operation(
        method="GET", path="/metrics", name="metrics", sender="anyone", reply="text/plain", about="Prometheus text"
    ),
    Operation(
        method="GET", path="/events", name="events", sender="anyone", reply="text/event-stream",
        about="What happens, as server-sent events",
    ),
    Operation(
        method="GET", path="/openapi.json", name="openapi", sender="anyone", reply="application/json",
        about="This document",
    ),
    Operation(
        method="GET", path="/health", name="health", sender="anyone", reply="application/json",
        about="It answers; needs no token",
    ),
)  # fmt: skip


@cache
def dataflow_document() -> dict[str, Any]:
    """OpenAPI of the data interface."""
    return document(
        "AstraFlow data interface",
        "Rollout nodes pull tasks and push episodes, trainers pull batches. All requests are idempotent by the ids in "
        "them: one whose answer was lost is sent again. The rules beyond shapes are in docs/protocol.md, and "
        "`astraflow conform` checks them.",
        OPERATIONS,
    )
