"""The rules that are checked, by role: their names and sentences, as in docs/protocol.md."""

from __future__ import annotations

ROLLOUT = {
    "token": "Every request carries the bearer token of the run.",
    "node.join": "A node joins, with the id of the run that it asked for, before it leases.",
    "node.heartbeat": "A node sends a heartbeat every heartbeat_s; after dead_after_s without one it is given up.",
    "node.rejoin": "A node that is answered 404 joins again and goes on.",
    "node.drop": "What a node leased before it was answered 404 is lost: it commits none of that afterwards.",
    "node.finished": "A node that is told `finished` leases no more and leaves; its process ends with 0.",
    "node.drain": "A node that is told to end (SIGTERM) gives its leases back with DELETE /nodes/{id}, and ends.",
    "lease.capacity": "A node never holds more episodes than the capacity it joined with.",
    "lease.fresh": "Each new lease request has a request_id of its own.",
    "lease.repeat": "A lease request whose answer was lost is sent again with the same request_id.",
    "commit.leased": "A node commits only what it holds: an episode and attempt that it leased.",
    "commit.all": "Every leased episode is committed before timeout_s is over, unless it was cancelled or given back.",
    "commit.once": "What was accepted, or refused, is not committed again.",
    "commit.rows": "The rows of a commit have the columns, types and equal lengths of the schema.",
    "commit.task": "group_id, source, row and epoch of a row are those of its lease.",
    "commit.versions": "Sampled tokens carry the weight version that sampled them: not older than min_versions of the "
    "lease, not newer than what was announced; -1 where nothing was sampled.",
    "commit.repeat": "A commit whose answer was lost is sent again as it was.",
    "commit.duplicate": 'An episode that is answered "duplicate" is committed, as one that is "accepted".',
    "cancel": "A heartbeat names what the node plays; an episode that its reply cancels is not committed (that "
    "attempt; a later one may be).",
    "full": "A request that is answered 507 is sent again after a pause; the process lives on.",
    "restart": "A service that is away for a moment is waited for; the work goes on.",
}

TRAINER = {
    "token": "Every request carries the bearer token of the run.",
    "resume.first": "A trainer resumes, with the id of the run that it asked for, before anything else.",
    "resume.fresh": "A trainer without a checkpoint resumes at version 0.",
    "resume.version": "A trainer that starts again resumes, with a new trainer_id, at the version of its last "
    "checkpoint or a later one, but none that was never acknowledged.",
    "resume.repeat": "A resume whose answer was lost is sent again with the same trainer_id.",
    "publish.resume": "The version that a trainer resumes at is visible in a weight store that it names.",
    "publish.ack": "A version is visible in the weight store before the second step after it is acknowledged, and "
    "before a checkpoint of it is reported; until then its readers wait.",
    "publish.immutable": "A version that was visible never changes, also when its step is trained again.",
    "batch.version": "A trainer asks for the batch after the version that it acknowledged (or resumed at) last.",
    "batch.wait": "A trainer that is answered 204 asks again, by long polls: wait_s, not a busy loop.",
    "batch.share": "Data-parallel ranks name one number of ranks and take all shares before the batch is acknowledged.",
    "batch.repeat": "A batch whose answer was lost is asked for again with the same version.",
    "ack.batch": "A trainer acknowledges the batch that it took, with version = its step.",
    "ack.once": "An acknowledgement that was answered is not sent again.",
    "ack.repeat": "An acknowledgement whose answer was lost is sent again as it was.",
    "replay": "Batches that are served again after a resume are trained and acknowledged in order, like any other.",
    "checkpoint": "A trainer reports checkpoints, none newer than what it acknowledged; the run ends covered.",
    "heartbeat": "A trainer sends heartbeats, so often that batch_lease_s is never over.",
    "replaced": "A trainer that is refused because a newer one took over ends, and does not resume again.",
    "over": "A trainer that is answered 410, or reached run.steps, asks for no more batches; its process ends with 0.",
    "full": "A request that is answered 507 is sent again after a pause; the process lives on.",
    "restart": "A service that is away for a moment is waited for; the work goes on.",
}

STAGE = {
    "token": "Every request carries the bearer token of the run.",
    "lease.fresh": "Each new lease request has a request_id of its own.",
    "lease.repeat": "A lease request whose answer was lost is sent again with the same request_id.",
    "lease.wait": "A worker that got nothing asks again, by long polls: wait_s, not a busy loop.",
    "columns.rows": "Columns come back for leased rows only, with the row_ids of the lease in their order.",
    "columns.shape": "The columns are those that the stage adds, of their types and lengths, and no other.",
    "columns.all": "Every leased entry is answered, with columns or as failed, before lease_s is over.",
    "columns.once": "An entry that was accepted, or refused, is not handed in again for the same attempt.",
    "columns.repeat": "Columns whose answer was lost are sent again as they were.",
    "worker.leave": "A worker that is told to end (SIGTERM) gives its leases back with DELETE, and ends.",
    "worker.finished": "A worker that is told `finished` leases no more and leaves; its process ends with 0.",
    "full": "A request that is answered 507 is sent again after a pause; the process lives on.",
    "restart": "A service that is away for a moment is waited for; the work goes on.",
}

CONSUMER = {
    "token": "Every request carries the bearer token of the run.",
    "read.policy": "A consumer reads, under its name in the run file, policies that the run file gives it.",
    "read.wait": "A consumer that got nothing asks again, by long polls: wait_s, not a busy loop.",
    "read.repeat": "A read whose answer was lost is sent again: the same groups come.",
    "ack.given": "A consumer acknowledges only what it was given since it started: never beyond the `next` of a reply.",
    "ack.all": "What a consumer has read is acknowledged, up to the last group of the run.",
    "ack.repeat": "An acknowledgement whose answer was lost is sent again as it was, before the next read.",
    "over": "A consumer that is told `finished` reads no more; its process ends with 0.",
    "full": "A request that is answered 507 is sent again after a pause; the process lives on.",
    "restart": "A service that is away for a moment is waited for; the work goes on.",
}

RULES = {"rollout": ROLLOUT, "trainer": TRAINER, "stage": STAGE, "consumer": CONSUMER}
