"""Some simulated nodes of `bench_pool`, in a process of their own: each has a connection and an id, none an engine.

    python -m benchmarks.pool_nodes --url http://127.0.0.1:9 --nodes 250 --threads 2 --seconds 20 [--pause 5] [--seed 0]

A node leases some episodes, commits them at once (one row per policy), and beats. `--pause`: seconds between two leases
of a node; 0: as fast as it can. Prints one JSON line: milliseconds of every request by kind, and what was done.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import threading
import time
from typing import Any

import numpy as np

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.types import Episode, EpisodeLease, Trajectory
from astraflow.wire import messages as m

EPISODES = 4  # of one lease
TOKENS = 256  # of one row
HEARTBEAT_S = 2.0


class Node:
    """One simulated node."""

    def __init__(self, url: str, name: str, run_id: str, taken: dict[str, list[float]]) -> None:
        self._client = DataflowClient(url)
        self._name, self._taken = name, taken
        self._timed(
            "join", lambda: self._client.join(m.Join(node_id=name, name=name, capacity=EPISODES, run_id=run_id))
        )
        self.num_episodes = 0

    def beat(self) -> None:
        """A sign of life."""
        self._timed("heartbeat", lambda: self._client.heartbeat(self._name, {"busy_s": 1.0}, {}))

    def play(self, wait_s: float) -> bool:
        """Lease and commit; False: there was nothing to do."""
        reply = self._timed("lease", lambda: self._client.lease(self._name, EPISODES, wait_s=wait_s))
        if not reply.leases:
            self._taken["lease"].pop()  # it waited for the gate, which says nothing of the service
            return False
        versions = {name: version.version for name, version in reply.versions.items()}
        episodes = [self._episode(lease, versions) for lease in reply.leases]
        self._timed("commit", lambda: self._client.commit(episodes))
        self.num_episodes += len(episodes)
        return True

    def close(self) -> None:
        """Leave without a word, as a node that is killed."""
        self._client.close()

    def _episode(self, lease: EpisodeLease, versions: dict[str, int]) -> Episode:
        rows = [row(name, max(version, 0)) for name, version in versions.items()]
        return Episode(
            episode_id=lease.episode_id, attempt=lease.attempt, node_id=self._name, task=lease.task, trajectories=rows
        )

    def _timed(self, kind: str, call: Any) -> Any:
        begin = time.perf_counter()
        result = call()
        self._taken[kind].append(1e3 * (time.perf_counter() - begin))
        return result


_MASK = np.arange(TOKENS) > TOKENS // 10
_IDS = np.arange(TOKENS, dtype=np.int32)
_LOGPROBS = np.where(_MASK, np.float32(-0.5), np.float32(0))
_CALLS = np.where(_MASK, 0, -1).astype(np.int16)


def row(policy: str, version: int) -> Trajectory:
    """One trajectory with a random reward."""
    return Trajectory(
        policy=policy, branch=0, parent_branch=-1, fork_at=0, token_ids=_IDS, loss_mask=_MASK,
        behavior_logprobs=_LOGPROBS, versions=np.where(_MASK, version, -1).astype(np.int32), call_index=_CALLS,
        reward=random.random(),
    )  # fmt: skip


class Lane:
    """One thread that drives its nodes."""

    def __init__(self, args: argparse.Namespace, number: int, run_id: str) -> None:
        self.taken: dict[str, list[float]] = {kind: [] for kind in ("join", "heartbeat", "lease", "commit")}
        self.late: list[float] = []
        share = args.nodes // args.threads
        self.nodes = [Node(args.url, f"n{args.seed}-{number}-{i}", run_id, self.taken) for i in range(share)]
        self._pause, self._random = args.pause, random.Random(f"{args.seed}/{number}")

    def run(self, until: float) -> None:
        """Beat every two seconds and play; a refusal ends the lane."""
        now = time.monotonic()
        due: list[tuple[float, int, bool]] = []
        for i in range(len(self.nodes)):
            heapq.heappush(due, (now + self._random.random() * HEARTBEAT_S, i, True))
            if self._pause:
                heapq.heappush(due, (now + self._random.random() * self._pause, i, False))
        turn = 0
        while (now := time.monotonic()) < until:
            if due and due[0][0] <= now:
                when, i, beat = heapq.heappop(due)
                self.late.append(1e3 * (now - when))
                if beat:
                    self.nodes[i].beat()
                    heapq.heappush(due, (when + HEARTBEAT_S, i, True))
                else:
                    self.nodes[i].play(0.0)
                    heapq.heappush(due, (max(when + self._pause, now), i, False))
            elif self._pause:
                time.sleep(min(max(due[0][0] - now, 0.0), until - now))
            else:
                turn += 1
                self.nodes[turn % len(self.nodes)].play(0.05)


def main() -> None:
    """Drive the nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    first = DataflowClient(args.url)
    run_id = first.run().run_id
    lanes = [Lane(args, number, run_id) for number in range(args.threads)]
    print(json.dumps({"joined": sum(len(lane.nodes) for lane in lanes)}), flush=True)
    input()  # until all processes have joined
    errors: list[str] = []

    def drive(lane: Lane) -> None:
        try:
            lane.run(until)
        except WireError as error:
            errors.append(str(error))

    begin = time.monotonic()
    until = begin + args.seconds
    threads = [threading.Thread(target=drive, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken: dict[str, list[float]] = {}
    for lane in lanes:
        for kind, values in lane.taken.items():
            taken.setdefault(kind, []).extend(round(v, 3) for v in values)
    episodes = sum(node.num_episodes for lane in lanes for node in lane.nodes)
    late = sorted(v for lane in lanes for v in lane.late)
    print(json.dumps({
        "taken": taken, "episodes": episodes, "seconds": time.monotonic() - begin, "errors": errors,
        "late_p99_ms": late[int(0.99 * len(late))] if late else 0.0,
    }))  # fmt: skip
    for lane in lanes:
        for node in lane.nodes:
            node.close()


if __name__ == "__main__":
    main()
