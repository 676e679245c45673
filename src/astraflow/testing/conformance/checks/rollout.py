"""What the requests of a rollout service must be like: a look at the exchanges of one act, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from astraflow.errors import SchemaError
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.tap import Exchange, in_order
from astraflow.wire.codec import TRAJECTORY_SCHEMA, check_schema, fitted, flat_values, list_lengths

Key = tuple[str, int]  # episode id, attempt
Span = tuple[float, float]  # start and end, monotonic
REQUESTS = ("join", "heartbeat", "lease", "commit", "drain")
GRACE_S = 0.5  # a request that is on its way while an answer comes is no fault


@dataclass
class _Node:
    capacity: int
    held: set[Key] = field(default_factory=set)  # leased and not handed in, as far as it knows
    cancelled: dict[Key, float] = field(default_factory=dict)  # when it was told
    forgotten: dict[Key, float] = field(default_factory=dict)  # held when it was answered 404, and when that was
    settled: set[Key] = field(default_factory=set)  # accepted or refused, and it knows
    asked: dict[str, str] = field(default_factory=dict)  # request id -> "asked", "answered" or "lost"
    announced: dict[str, int] = field(default_factory=dict)  # newest version of each policy that it was told of
    last_beat: float = 0.0


class RolloutCheck:
    """Puts what it reads into `findings`."""

    def __init__(self, findings: Findings, run_id: str, dead_after_s: float, away: Sequence[Span] = ()) -> None:
        """`away`: when the service could not be reached."""
        self._hold, self._run_id, self._away = findings.hold, run_id, away
        self._longest_beat_s = 0.8 * dead_after_s
        self._nodes: dict[str, _Node] = {}
        self._leases: dict[Key, dict[str, Any]] = {}

    def read(self, exchanges: Sequence[Exchange]) -> None:
        """All exchanges of an act."""
        for x, answer in in_order([x for x in exchanges if x.name in REQUESTS or x.status == 401]):
            if answer:
                self._hold("token", x.status != 401, f"{x.name} came without the token of the run")
                self._answered(x)
            else:
                self._asked(x)
        for node in self._nodes.values():
            for rule, left in (("node.drop", node.forgotten), ("cancel", node.cancelled)):
                if left:
                    self._hold(rule, True, "")

    def _asked(self, x: Exchange) -> None:
        if x.status == 401:
            return
        if x.name == "join":
            same = x.body.get("run_id") == self._run_id
            self._hold("node.join", same, f"it joins run_id={x.body.get('run_id')!r}; GET /run says {self._run_id!r}")
            return
        node_id = x.params.get("node_id") or x.body.get("node_id", "")
        node = self._nodes.get(node_id)
        self._hold("node.join", node is not None, f"{x.name} of node {node_id!r}, which did not join")
        if node is None:
            return
        gap = x.at - node.last_beat
        if not any(start < x.at and end > node.last_beat for start, end in self._away):
            self._hold("node.heartbeat", gap <= self._longest_beat_s, f"{gap:.1f} s passed without a heartbeat")
        match x.name:
            case "heartbeat":
                node.last_beat = x.at
            case "lease":
                self._lease(node, x.body.get("request_id", ""))
            case "commit":
                for episode in x.body.get("episodes", ()):
                    self._episode(node, x.at, (episode["episode_id"], int(episode["attempt"])))
                if more := x.body.get("next"):
                    self._lease(node, more["request_id"])
            case "drain":
                node.held.clear()

    def _lease(self, node: _Node, request_id: str) -> None:
        used = node.asked.get(request_id) == "answered"
        self._hold("lease.fresh", not used, f"request_id={request_id} was answered, and is used again")
        for other in [i for i, state in node.asked.items() if state == "lost"]:
            same = other == request_id
            self._hold("lease.repeat", same, f"the answer to request_id={other} was lost; it asks with another one")
            del node.asked[other]
        node.asked[request_id] = "asked"

    def _episode(self, node: _Node, at: float, key: Key) -> None:
        name = f"{key[0]}, attempt {key[1]},"
        self._hold("commit.leased", key in self._leases, f"{name} is committed, and was never leased")
        self._hold("commit.once", key not in node.settled, f"{name} was answered, and is committed again")
        if at - node.forgotten.pop(key, at) > GRACE_S:
            self._hold("node.drop", False, f"{name} is committed although the node was forgotten while it held it")
        elif at - node.cancelled.pop(key, at) > GRACE_S:
            self._hold("cancel", False, f"{name} is committed after a heartbeat's reply cancelled it")
        node.held.discard(key)

    def _answered(self, x: Exchange) -> None:
        if x.name == "join":
            if x.done:
                joined = self._nodes.setdefault(x.body["node_id"], _Node(int(x.body["capacity"])))
                joined.last_beat = x.answered
                self._hear(joined, x)
            return
        node = self._nodes.get(x.params.get("node_id") or x.body.get("node_id", ""))
        if node is None:
            return
        if x.status == 404:
            node.forgotten |= dict.fromkeys(node.held, x.answered)
            node.held.clear()
        match x.name:
            case "heartbeat" if x.done:
                self._hear(node, x)
                for episode_id, attempt in x.reply.get("cancelled", ()):
                    node.cancelled.setdefault((episode_id, attempt), x.answered)
                    node.held.discard((episode_id, attempt))
            case "lease":
                self._leased(node, x, x.body.get("request_id", ""))
            case "commit":
                told = x.rows is not None and x.status in (200, 422) and self._contents(node, x.rows)
                wrong = x.status in (413, 415, 422) and not told  # else the rule has a name of its own
                self._hold("commit.rows", not wrong, f"answered {x.status}: {x.reply.get('error')}")
                if x.done:
                    node.settled |= {(e["episode_id"], int(e["attempt"])) for e in x.body["episodes"]}
                if more := x.body.get("next"):
                    self._leased(node, x, more["request_id"])

    def _leased(self, node: _Node, x: Exchange, request_id: str) -> None:
        lost = x.fault == "lost" or x.status in (503, 507)
        node.asked[request_id] = "lost" if lost else "answered"
        for lease in x.reply.get("leases", ()):
            self._leases[lease["episode_id"], lease["attempt"]] = lease
        if not x.done:
            return
        self._hear(node, x)
        node.held |= {(lease["episode_id"], lease["attempt"]) for lease in x.reply["leases"]} - node.settled
        count = len(node.held)
        self._hold("lease.capacity", count <= node.capacity, f"it holds {count}, and joined with {node.capacity}")

    def _contents(self, node: _Node, rows: pa.Table) -> bool:
        """What the columns say; True: they break another rule than that of their shapes."""
        rows = fitted(rows, TRAJECTORY_SCHEMA)
        try:
            check_schema(rows, TRAJECTORY_SCHEMA, only=True)
        except SchemaError:
            return False
        tasks, versions = self._tasks(rows), self._versions(node, rows)
        return not (tasks and versions)

    def _tasks(self, rows: pa.Table) -> bool:
        right = True
        for row in rows.select(["episode_id", "attempt", "group_id", "source", "row", "epoch"]).to_pylist():
            lease = self._leases.get((row["episode_id"], row["attempt"]))
            if lease is not None:
                task = lease["task"]
                wanted = (lease["group_id"], task["source"], task["row"], task["epoch"])
                got = (row["group_id"], row["source"], row["row"], row["epoch"])
                self._hold("commit.task", got == wanted, f"a row of {row['episode_id']} says {got}, its lease {wanted}")
                right &= got == wanted
        return right

    def _versions(self, node: _Node, rows: pa.Table) -> bool:
        mask, versions = flat_values(rows["loss_mask"]), flat_values(rows["versions"])
        right = bool((versions[~mask] == -1).all())
        self._hold("commit.versions", right, "a token that was not sampled carries a weight version")
        owners = np.repeat(np.arange(rows.num_rows), list_lengths(rows["token_ids"]))
        keys = list(zip(rows["episode_id"].to_pylist(), rows["attempt"].to_pylist(), strict=True))
        policies = rows["policy"].to_pylist()
        for row in np.unique(owners[mask]).tolist():
            own = versions[mask & (owners == row)]
            low = self._leases.get(keys[row], {}).get("min_versions", {}).get(policies[row], 0)
            high = node.announced.get(policies[row], -1)
            possible = bool(low <= own.min() and own.max() <= high)
            right &= possible
            self._hold(
                "commit.versions", possible,
                f"{keys[row][0]} has tokens of versions {own.min()} to {own.max()}; {low} to {high} were possible",
            )  # fmt: skip
        return right

    def _hear(self, node: _Node, x: Exchange) -> None:
        for policy, newest in x.reply.get("versions", {}).items():
            node.announced[policy] = max(node.announced.get(policy, -1), newest["version"])
