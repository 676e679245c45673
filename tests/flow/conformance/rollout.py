"""A small rollout service that keeps every rule, or breaks the one that is named: python rollout.py URL [FAULT]."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
from participant import Participant

from astraflow.errors import WireError
from astraflow.types import Episode, EpisodeLease, Trajectory
from astraflow.wire import messages as m
from astraflow.wire.codec import write_stream
from astraflow.wire.episodes import encode_episodes

CAPACITY = 4


class Node(Participant):
    def __init__(self, url: str, fault: str) -> None:
        super().__init__(url, fault)
        self.id, self.stopping, self.over = f"n-{uuid.uuid4().hex[:8]}", False, False
        self.held: dict[tuple[str, int], tuple[float, EpisodeLease]] = {}
        self.cancelled: set[tuple[str, int]] = set()
        self.newest, self.beat_at, self.again = 0, 0.0, ""

    def join(self) -> None:
        run = self.patiently(lambda: self.http.json("GET", "/run", None, m.RunReply))
        run_id = "other" if self.fault == "wrong_run" else run.run_id
        body = m.Join(node_id=self.id, name="n", capacity=CAPACITY, run_id=run_id)
        reply = self.patiently(lambda: self.http.json("POST", "/nodes", body, m.JoinReply))
        self.every_s = reply.heartbeat_s
        self.hear(reply)

    def hear(self, reply: Any) -> None:
        self.newest = max(self.newest, reply.versions["actor"].version)

    def heartbeat(self) -> None:
        if self.fault == "no_heartbeat" or time.monotonic() - self.beat_at < self.every_s:
            return
        self.beat_at = time.monotonic()
        path = f"/nodes/{self.id}/heartbeat"
        body = m.Heartbeat(playing=[] if self.fault == "names_nothing" else list(self.held))
        reply = self.patiently(lambda: self.http.json("POST", path, body, m.HeartbeatReply))
        self.hear(reply)
        self.cancelled |= set(reply.cancelled)
        if self.fault not in ("ignores_cancel", "keeps_lost_leases"):
            self.held = {key: value for key, value in self.held.items() if key not in self.cancelled}
        self.over |= reply.finished and self.fault != "ignores_finished"

    def lease(self) -> None:
        room = CAPACITY - len(self.held) if self.fault != "over_capacity" else CAPACITY
        if room <= 0:
            return
        request_id = "always" if self.fault == "same_request_id" else self.again or uuid.uuid4().hex
        body = m.LeaseRequest(node_id=self.id, request_id=request_id, n=room, wait_s=0.1)
        self.again = request_id
        repeat = self.fault != "new_id_after_loss"
        reply = self.patiently(lambda: self.http.json("POST", "/leases", body, m.LeaseReply), repeat)
        self.again = ""
        if reply is None:
            return
        self.hear(reply)
        for lease in reply.leases:
            self.held[lease.episode_id, lease.attempt] = (time.monotonic(), lease)
        self.over |= reply.finished and self.fault != "ignores_finished"

    def commit_due(self) -> None:
        slow = 1.0 if self.fault == "over_capacity" else 0.0
        for key, (since, lease) in list(self.held.items()):
            if time.monotonic() - since < lease.task["pause_s"] + slow:
                continue
            del self.held[key]
            if self.fault == "drops_some" and lease.episode_id.endswith("/1"):
                continue
            self.commit(lease)

    def commit(self, lease: EpisodeLease) -> None:
        body = encoded(lease, self.id, self.newest, self.fault)
        repeat = self.fault != "no_commit_repeat"
        for _ in range(2 if self.fault == "commits_twice" else 1):
            reply = self.patiently(lambda: self.http.post_stream("/episodes", [body], m.EpisodesReply), repeat)
            if self.fault == "hates_duplicates" and "duplicate" in reply.results.values():
                raise SystemExit(1)

    def live(self) -> None:
        if self.fault != "no_join":
            self.join()
        else:
            self.every_s = 0.2
        while not (self.over or self.stopping):
            try:
                self.heartbeat()
                self.lease()
                self.commit_due()
            except WireError as error:
                if error.status != 404 or self.fault == "no_join":
                    raise
                if self.fault == "no_rejoin":
                    time.sleep(0.1)
                    continue
                if self.fault != "keeps_lost_leases":
                    self.held.clear()
                self.join()
            time.sleep(0.01)
        if self.fault != "no_drain":
            self.http.json("DELETE", f"/nodes/{self.id}", None, m.Ok)


def encoded(lease: EpisodeLease, node_id: str, version: int, fault: str) -> memoryview:
    mask = np.arange(6) >= 3
    version += 5 if fault == "wrong_version" else 0
    row = Trajectory(
        policy="actor", branch=0, parent_branch=-1, fork_at=0, token_ids=np.arange(3, 9, dtype=np.int32),
        loss_mask=mask, behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, version, 0 if fault == "version_of_given" else -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int16), reward=float(lease.episode_id[-1]),
    )  # fmt: skip
    attempt = lease.attempt + (1 if fault == "wrong_attempt" else 0)
    episode = Episode(
        episode_id=lease.episode_id, attempt=attempt, node_id=node_id, task=lease.task, trajectories=[row]
    )
    header, table = encode_episodes([episode], node_id)
    if fault == "wrong_row":
        table = replaced(table, "row", [lease.task.row + 99])
    if fault == "wrong_lengths":
        table = replaced(table, "versions", [table.column("versions")[0].as_py()[:-1]])
    return memoryview(write_stream(header, table))


def replaced(table: pa.RecordBatch, name: str, values: list[Any]) -> pa.RecordBatch:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))


if __name__ == "__main__":
    node = Node(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    signal.signal(signal.SIGTERM, lambda *_: setattr(node, "stopping", True))
    node.live()
