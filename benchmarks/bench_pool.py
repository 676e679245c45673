"""How large a pool does one data service carry? 1,000 simulated nodes and 8 policies against one process.

| phase        | what happens                                                                                         |
|--------------|------------------------------------------------------------------------------------------------------|
| steady       | every node beats every 2 s and plays 4 episodes every 5 s, each with one row per policy              |
| saturated    | the same nodes, as fast as the service lets them                                                     |
| two services | half the nodes and half the policies each, in two run directories side by side, as fast as they can  |

A node has a connection of its own and no engine: it commits what it leased at once. One trainer per policy takes
batches and acknowledges them, without training. Everything runs on this machine, so the nodes compete with the service
for its cores: what the service could do alone follows from its CPU time.

    python -m benchmarks.bench_pool [--nodes 1000] [--policies 8] [--seconds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.wire import messages as m
from benchmarks.dataflow_load import Service, service
from benchmarks.harness import Result

GROUP, GROUPS, STALENESS = 4, 32, 40  # a pool of 1,000 nodes holds up to 1,000 groups
RUN_FILE = """
[run]
name = "pool"
steps = 1000000
[sources.train]
type = "calculator"
size = 1000000
[workflow]
type = "single_turn"
reward = "exact"
group_size = {group}
timeout_s = 600.0
[dataflow]
dead_after_s = 120.0  # nodes are silent until all have joined
{policies}
"""
POLICY = """
[policies.p{number}]
model = "tiny-char"
operators = ["keep_all"]
batch = {{ groups = {groups}, max_staleness = {staleness} }}
"""
Row = dict[str, Any]


def run_file(policies: int) -> str:
    """A run with so many policies, all in every episode."""
    sections = [POLICY.format(number=i, groups=GROUPS, staleness=STALENESS) for i in range(policies)]
    return RUN_FILE.format(group=GROUP, policies="".join(sections))


class Trainers:
    """One trainer per policy that trains nothing, in one thread."""

    def __init__(self, url: str, policies: int) -> None:
        self._client = DataflowClient(url)
        run_id = self._client.run().run_id
        self.versions = {f"p{i}": 0 for i in range(policies)}
        for name in self.versions:
            self._client.resume(name, m.Resume(trainer_id="t", version=0, urls=(), run_id=run_id))
        self.taken: dict[str, list[float]] = {"batch": [], "ack": []}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def stop(self) -> None:
        """No more steps."""
        self._over.set()
        self._thread.join()
        self._client.close()

    def _train(self) -> None:
        while not self._over.is_set():
            trained = [name for name in self.versions if self._step(name)]
            if not trained:
                self._over.wait(0.02)

    def _step(self, name: str) -> bool:
        begin = time.perf_counter()
        got = self._client.batch(name, "t", self.versions[name])
        middle = time.perf_counter()
        if got is None:
            return False
        self._client.ack(got[0], "t")
        self.taken["batch"].append(1e3 * (middle - begin))
        self.taken["ack"].append(1e3 * (time.perf_counter() - middle))
        self.versions[name] = got[0].step
        if got[0].step % 4 == 0:
            self._client.checkpoint(name, "t", got[0].step)
        return True


class Nodes:
    """Processes of simulated nodes that wait for the start."""

    def __init__(self, running: Service, nodes: int, processes: int, seconds: float, pause: float, seed: int) -> None:
        command = [
            sys.executable, "-m", "benchmarks.pool_nodes", f"--url={running.url}", f"--nodes={nodes // processes}",
            f"--seconds={seconds}", f"--pause={pause}",
        ]  # fmt: skip
        self._children = [
            subprocess.Popen(
                [*command, f"--seed={seed + i}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                cwd=Path(__file__).parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for i in range(processes)
        ]  # fmt: skip
        self.num_joined = sum(self._said(child)["joined"] for child in self._children)

    def start(self) -> None:
        """Begin."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()

    def finish(self) -> list[Row]:
        """What each process measured."""
        found = [self._said(child) for child in self._children]
        for child in self._children:
            child.communicate(timeout=30)
        return found

    @staticmethod
    def _said(child: subprocess.Popen[str]) -> Row:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"nodes ended with exit code {child.wait()}")
        said: Row = json.loads(line)
        return said


def phase(name: str, services: Sequence[Service], args: argparse.Namespace, pause: float, seed: int) -> list[Row]:
    """Run one phase against these services; a row for each kind of request and one for the whole."""
    policies = args.policies // len(services)
    trainers = [Trainers(s.url, policies) for s in services]
    nodes = [
        Nodes(s, args.nodes // len(services), args.processes // len(services), args.seconds, pause, seed + 100 * i)
        for i, s in enumerate(services)
    ]
    before, begin = [s.cpu_s() for s in services], time.perf_counter()
    for group in nodes:
        group.start()
    found = [said for group in nodes for said in group.finish()]
    wall = time.perf_counter() - begin
    cpu = [s.cpu_s() - b for s, b in zip(services, before, strict=True)]
    for trainer in trainers:
        trainer.stop()
    if errors := [e for said in found for e in said["errors"]]:
        raise SystemExit(f"{len(errors)} lanes ended early, the first with: {errors[0]}")
    taken: dict[str, list[float]] = {}
    for part in (*(said["taken"] for said in found), *(t.taken for t in trainers)):
        for kind, values in part.items():
            taken.setdefault(kind, []).extend(values)
    rows = [request_row(name, kind, values, wall) for kind, values in taken.items() if values and kind != "join"]
    num_requests = sum(len(values) for values in taken.values())
    whole = {
        "phase": name, "request": "all", "nodes": sum(group.num_joined for group in nodes), "services": len(services),
        "per_s": round(num_requests / wall, 1), "episodes_per_s": round(sum(s["episodes"] for s in found) / wall, 1),
        "steps": sum(v for t in trainers for v in t.versions.values()),
        "service_cpu": round(sum(cpu) / wall, 3), "cpu_ms_per_request": round(1e3 * sum(cpu) / num_requests, 3),
        "rss_mb": round(sum(s.rss_mb() for s in services), 1), "late_p99_ms": max(s["late_p99_ms"] for s in found),
    }  # fmt: skip
    return [*rows, whole]


def request_row(name: str, kind: str, values: list[float], wall: float) -> Row:
    """Rate and percentiles of one kind of request."""
    p50, p99 = np.percentile(values, [50, 99])
    return {
        "phase": name, "request": kind, "per_s": round(len(values) / wall, 1), "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2), "max_ms": round(max(values), 1),
    }  # fmt: skip


def main() -> None:
    """Measure and write `results/pool.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--policies", type=int, default=8)
    parser.add_argument("--processes", type=int, default=4, help="that simulate nodes")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    args = parser.parse_args()
    folder, load = Path(tempfile.mkdtemp(prefix="bench-pool-")), os.getloadavg()[0]
    rows: list[Row] = []
    try:
        for seed, (name, pause) in enumerate((("steady", 5.0), ("saturated", 0.0))):
            with service(folder / name, run_file(args.policies)) as running:
                rows += phase(name, [running], args, pause, 10 * seed)
        halves = run_file(args.policies // 2)
        with service(folder / "first", halves) as first, service(folder / "second", halves) as second:
            rows += phase("two services", [first, second], args, 0.0, 20)
    except WireError as error:
        raise SystemExit(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {**vars(args), "load_at_start": round(load, 2)}
    result = Result("pool", settings, rows)
    result.show()
    print(f"wrote {result.write()}")


if __name__ == "__main__":
    main()
