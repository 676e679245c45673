"""What a node says of itself in its heartbeats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from astraflow.rollout.commit import Committer
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.pool import WorkerPool
from astraflow.rollout.runner import Runner
from astraflow.rollout.serving.engines import Serving
from astraflow.rollout.swarm.part import Swarm


class NodeStats:
    """Flat names; monotonic counters unless said otherwise.

    sampled_tokens, prefill_tokens, requests, swaps, ...: summed over the engines; busy_s: their mean, so that idle time
    is 1 - its growth per second of uptime_s. running, waiting: gauges, requests in the engines. kv_usage: gauge, of the
    fullest engine. concurrency, episodes_in_play, episodes_waiting, commit_backlog: gauges. episodes_done,
    episodes_failed/<kind>, calls, loop_cpu_s (CPU of the event loop's thread: gateway, runner and channels, all calls
    together), workers_restarted, edits and edits_refused (of the workflow's files), weight_failures, unreachable,
    commits/<result>, gateway/<counter>. With `weights.check`, weights_checked: versions compared with what the engine
    computes with; weights_wrong: those with which it does not. With a door, swarm/... (`Swarm.stats`). Where policies
    are reached on other nodes, far_requests, far_tokens (counted there in sampled_tokens too), and far_lost: requests
    that went on at another node.
    """

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._serving: Serving | None = None
        self._parts: tuple[Gateway, Sequence[Runner], WorkerPool | None] | None = None
        self._swarm: Swarm | None = None
        self._cpu_at_start = time.thread_time()
        self._since = time.monotonic()

    def watch(
        self,
        serving: Serving,
        gateway: Gateway,
        runners: Sequence[Runner],
        pool: WorkerPool | None,
        swarm: Swarm | None = None,
    ) -> None:
        """The parts are there now. Call it and `read` on the loop's thread."""
        self._serving, self._parts, self._swarm = serving, (gateway, runners, pool), swarm
        self._cpu_at_start = time.thread_time()

    def versions(self) -> dict[str, int]:
        """Policy -> newest version in force."""
        if self._serving is None:
            return {}
        versions: dict[str, int] = {}
        for name, engine, _ in self._serving.pairs():
            versions[name] = max(versions.get(name, -1), engine.version)
        return versions

    def notes(self) -> dict[str, str]:
        """For people: the version of the workflow's code, and why the newest edit is not played."""
        pool = self._parts[2] if self._parts is not None else None
        return pool.notes() if pool is not None else {}

    def read(self) -> dict[str, float]:
        """The values now; empty while the node is being built."""
        if self._parts is None or self._serving is None:
            return {}
        gateway, runners, pool = self._parts
        served = list(self._serving.pairs())
        weights = [each for _, _, each in served]
        stats: dict[str, float] = {}
        for _, engine, _ in served:
            for name, value in engine.stats().items():
                stats[name] = max(stats.get(name, 0.0), value) if name == "kv_usage" else stats.get(name, 0.0) + value
        stats["busy_s"] = stats.get("busy_s", 0.0) / max(1, len(served))
        for check in (each.check for each in weights if each.check is not None):
            for name, count in check.counts.items():
                stats[name] = stats.get(name, 0.0) + count
        for far in (each for engines in self._serving.far.values() for each in engines):
            for name, value in far.counts.items():
                stats[name] = stats.get(name, 0.0) + value
        stats.update(gateway.stats())
        for kind, count in sum((runner.endings for runner in runners), Counter[str]()).items():
            name = f"episodes_{kind}" if kind in ("done", "cancelled") else f"episodes_failed/{kind}"
            stats[name] = float(count)
        stats.update({f"commits/{result}": float(n) for result, n in self._committer.results.items()})
        stats.update(
            uptime_s=time.monotonic() - self._since,
            concurrency=float(sum(runner.capacity for runner in runners)),
            episodes_in_play=float(sum(runner.num_in_play for runner in runners)),
            episodes_waiting=float(sum(runner.num_waiting for runner in runners)),
            commit_backlog=float(self._committer.backlog),
            calls=stats["gateway/calls"],
            loop_cpu_s=time.thread_time() - self._cpu_at_start,
            workers_restarted=float(pool.num_restarts if pool is not None else 0),
            edits=float(pool.num_edits if pool is not None else 0),
            edits_refused=float(pool.num_refused_edits if pool is not None else 0),
            weight_failures=float(sum(w.num_failures for w in weights)),
            unreachable=float(self._committer.reach.num_failures),
        )
        return stats | (self._swarm.stats() if self._swarm is not None else {})

    def summary(self) -> str:
        """One line for the log."""
        stats = self.read()
        if not stats:
            return "nothing was played"
        failed = sum(v for k, v in stats.items() if k.startswith("episodes_failed/"))
        per_call_us = 1e6 * stats["loop_cpu_s"] / max(1.0, stats["calls"])
        return (
            f"{stats.get('episodes_done', 0):.0f} episodes done, {failed:.0f} failed, {stats['calls']:.0f} calls, "
            f"{per_call_us:.0f} us of the loop's CPU per call"
        )
