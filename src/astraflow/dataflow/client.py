"""The dataflow service as nodes and trainers see it: one method per request, synchronous, thread-safe, torch-free."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from astraflow.dataflow.storage.shared import SharedBatch, shared_table
from astraflow.errors import DataflowError
from astraflow.types import BatchHeader, Episode, Task
from astraflow.wire import messages as m
from astraflow.wire.client import HttpClient
from astraflow.wire.codec import CONTENT_TYPE, read_stream, stream_pieces
from astraflow.wire.episodes import episode_pieces
from astraflow.wire.local import HOST_HEADER


class DataflowClient:
    """Every method raises `WireError` (its `status` says which refusal) and `Unreachable` after `give_up_s`.

    Stats and metrics that are not finite are left out, since JSON has no NaN; what is no number is a `DataflowError`.
    """

    def __init__(self, url: str, token: str | None = None, *, give_up_s: float = 10.0) -> None:
        self._http = HttpClient(url, token, give_up_s=give_up_s)

    def run(self) -> m.RunReply:
        """The run that the service serves, with its resolved run file."""
        return self._http.json("GET", "/run", None, m.RunReply)

    def row(self, source: str, row: int) -> Task:
        """The task of one row of a source, as it would be leased. Status 404: there is none."""
        return self._http.json("GET", f"/sources/{source}/rows/{row}", None, Task)

    def join(self, join: m.Join) -> m.JoinReply:
        """Enter the pool as a node; again is a no-op."""
        return self._http.json("POST", "/nodes", join, m.JoinReply)

    def heartbeat(
        self,
        node_id: str,
        stats: Mapping[str, float],
        versions: Mapping[str, int],
        playing: Sequence[tuple[str, int]] = (),
        notes: Mapping[str, str] | None = None,
        offers: Mapping[str, m.Offer] | None = None,
        lacks: Sequence[str] = (),
    ) -> m.HeartbeatReply:
        """The node lives, and plays these attempts; the reply says which of them it need not play any more, and who
        offers engines of the policies that it `lacks`. A `WireError` with status 404 means: join again, and drop what
        you play."""
        body = m.Heartbeat(stats=_finite("stats", stats), versions=dict(versions), playing=list(playing))
        body.notes, body.offers, body.lacks = dict(notes or {}), dict(offers or {}), list(lacks)
        return self._http.json("POST", f"/nodes/{node_id}/heartbeat", body, m.HeartbeatReply)

    def drain(self, node_id: str) -> None:
        """Leave the pool; leases are given back."""
        self._http.json("DELETE", f"/nodes/{node_id}", None, m.Ok)

    def give_back(self, node_id: str, leases: Sequence[tuple[str, int, bool]]) -> None:
        """The node will not play these: (episode id, attempt, whether that counts towards workflow.max_attempts)."""
        self._http.json("POST", f"/nodes/{node_id}/returns", m.Returned(list(leases)), m.Ok)

    def lease(self, node_id: str, n: int, *, wait_s: float = 0.0, request_id: str | None = None) -> m.LeaseReply:
        """Up to `n` episodes, waiting at most `wait_s` for the first. A repeated `request_id` gets the same ones."""
        request_id = request_id or uuid.uuid4().hex
        body = m.LeaseRequest(node_id=node_id, request_id=request_id, n=n, wait_s=wait_s)
        return self._http.json("POST", "/leases", body, m.LeaseReply, wait_s=wait_s)

    def commit(self, episodes: Sequence[Episode], engines: Mapping[str, str] | None = None) -> dict[str, str]:
        """Hand in episodes of one node: episode id -> "accepted", "duplicate" or "refused: <why>".

        Args: engines: policy -> engine that sampled it, as `wire.messages.EpisodesHeader` says.
        """
        return self.exchange(episodes, engines, None).results

    def exchange(
        self, episodes: Sequence[Episode], engines: Mapping[str, str] | None, more: m.NextLeases | None
    ) -> m.EpisodesReply:
        """`commit`, and the leases that are there at once in the same request (`more`: how many). Send it again with
        the same `more` when its answer is lost."""
        if not episodes:
            return m.EpisodesReply({})
        nodes = {e.node_id for e in episodes}
        if len(nodes) > 1:
            raise DataflowError("node_id", sorted(nodes), "must be one per commit", "commit for each node by itself")
        pieces = episode_pieces(episodes, episodes[0].node_id, engines, more)
        return self._http.post_stream("/episodes", pieces, m.EpisodesReply)

    def resume(self, policy: str, resume: m.Resume) -> m.ResumeReply:
        """A trainer of `policy` starts at `resume.version`; batches after it will be served again."""
        return self._http.json("POST", f"/policies/{policy}/resume", resume, m.ResumeReply)

    def trainer_heartbeat(
        self, policy: str, trainer_id: str, stats: Mapping[str, float] | None = None,
        stores: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """The trainer lives, and is not reported as silent. `stores`: URL -> newest version of further stores."""
        body = m.TrainerHeartbeat(trainer_id=trainer_id, stats=_finite("stats", stats), stores=dict(stores or {}))
        self._http.json("POST", f"/policies/{policy}/heartbeat", body, m.Ok)

    def batch(
        self, policy: str, trainer_id: str, version: int, *, wait_s: float = 0.0, rank: int = 0, ranks: int = 1
    ) -> tuple[BatchHeader, pa.Table] | None:
        """The batch of step `version + 1` (columns: `wire.codec.TRAINING_SCHEMA`, then those of stages), or the share
        of one of several ranks; None: not full within `wait_s`.
        """
        body = m.BatchRequest(trainer_id=trainer_id, version=version, wait_s=wait_s, rank=rank, ranks=ranks)
        path = f"/policies/{policy}/batches"
        status, payload, headers = self._http.get_bytes("POST", path, body, wait_s=wait_s)
        if status == 204:
            return None
        if headers.get("content-type") != CONTENT_TYPE:  # the service is on this host and says where the rows lie
            shared = msgspec.json.decode(payload, type=SharedBatch)
            if (table := shared_table(shared)) is not None:
                return shared.header, table
            _, payload, _ = self._http.get_bytes("POST", path, body, wait_s=wait_s, headers={HOST_HEADER: ""})
        return read_stream(payload, BatchHeader)

    def ack(self, header: BatchHeader, trainer_id: str, metrics: Mapping[str, float] | None = None) -> None:
        """The batch was trained and version `header.step` is published."""
        body = m.Ack(trainer_id=trainer_id, version=header.step, metrics=_finite("metrics", metrics))
        self._http.json("POST", f"/policies/{header.policy}/batches/{header.batch_id}/ack", body, m.Ok)

    def checkpoint(self, policy: str, trainer_id: str, version: int) -> None:
        """A checkpoint of `version` is on disk."""
        body = m.Checkpoint(trainer_id=trainer_id, version=version)
        self._http.json("POST", f"/policies/{policy}/checkpoints", body, m.Ok)

    def stage_lease(
        self,
        stage: str,
        worker_id: str,
        n: int,
        *,
        wait_s: float = 0.0,
        request_id: str | None = None,
        stats: Mapping[str, float] | None = None,
    ) -> tuple[m.StageRows, pa.Table]:
        """Entries with about `n` rows for a worker of a stage. `n` = 0: only a sign of life."""
        request_id = request_id or uuid.uuid4().hex
        numbers = _finite("stats", stats)
        body = m.StageRequest(worker_id=worker_id, request_id=request_id, n=n, wait_s=wait_s, stats=numbers)
        _, payload, _ = self._http.get_bytes("POST", f"/stages/{stage}/leases", body, wait_s=wait_s)
        return read_stream(payload, m.StageRows)

    def stage_columns(self, stage: str, header: m.ColumnsHeader, columns: pa.Table) -> dict[str, str]:
        """Hand in columns: entry id -> "accepted" or "refused: <why>"."""
        pieces = stream_pieces(header, columns)
        return self._http.post_stream(f"/stages/{stage}/columns", pieces, m.ColumnsReply).results

    def stage_leave(self, stage: str, worker_id: str) -> None:
        """A worker leaves; its leases are given back."""
        self._http.json("DELETE", f"/stages/{stage}/workers/{worker_id}", None, m.Ok)

    def consume(
        self, consumer: str, policy: str, n: int = 16, *, wait_s: float = 0.0
    ) -> tuple[m.ConsumerHeader, pa.Table]:
        """Up to `n` groups that the consumer has not acknowledged, waiting at most `wait_s` for the first."""
        body = m.ConsumerRequest(policy=policy, n=n, wait_s=wait_s)
        _, payload, _ = self._http.get_bytes("POST", f"/consumers/{consumer}/batches", body, wait_s=wait_s)
        return read_stream(payload, m.ConsumerHeader)

    def consumer_ack(self, consumer: str, header: m.ConsumerHeader) -> None:
        """The consumer is done with the groups of `header`."""
        body = m.ConsumerAck(policy=header.policy, position=header.next)
        self._http.json("POST", f"/consumers/{consumer}/ack", body, m.Ok)

    def relay(self, relay_id: str, relay: m.Relay) -> m.RelayReply:
        """I serve weights; what there is to relay."""
        return self._http.json("POST", f"/relays/{relay_id}", relay, m.RelayReply, wait_s=relay.wait_s)

    def status(self) -> dict[str, Any]:
        """What `/status` shows."""
        return self._http.json("GET", "/status", None, dict[str, Any])

    def close(self) -> None:
        """End waits and drop connections."""
        self._http.close()


def _finite(thing: str, numbers: Mapping[str, float] | None) -> dict[str, float]:
    finite: dict[str, float] = {}
    for name, value in dict(numbers or {}).items():  # a copy: another thread may add to it
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataflowError(
                f"{thing}[{name!r}]", value, "must be a number", "give a float, or leave it out"
            ) from error
        if math.isfinite(number):
            finite[name] = number
    return finite
