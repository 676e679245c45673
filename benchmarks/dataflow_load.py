"""The work of `bench_dataflow`: ragged trajectories, a service in a process of its own, a client that times its calls.

The batch is that of the peer's script: lengths log-normal (sigma 0.6, clipped to [64, 4 x mean]). A token of ours is
14.1 bytes on the way in and 18.1 on the way out; the peer's is 24.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import urllib3
from msgspec.structs import replace

from astraflow.dataflow.client import DataflowClient
from astraflow.launch.rundir import read_ready
from astraflow.types import Episode, EpisodeLease, Trajectory
from astraflow.wire import messages as m

PUT_BYTES_PER_TOKEN = 4 + 1 / 8 + 4 + 4 + 2
GET_BYTES_PER_TOKEN = PUT_BYTES_PER_TOKEN + 4
RUN_FILE = """
[run]
name = "bench"
steps = 1000000
[sources.train]
type = "calculator"
size = 1000000
[workflow]
type = "single_turn"
reward = "exact"
group_size = {group_size}
timeout_s = 600.0
[policies.actor]
model = "tiny-char"
operators = ["keep_all"]
batch = {{ groups = {groups}, max_staleness = {max_staleness} }}
"""


def make_lengths(rows: int, mean: float, seed: int = 0) -> np.ndarray:
    """[rows] int64: tokens of each row."""
    raw = np.random.default_rng(seed).lognormal(0.0, 0.6, rows)
    lengths = np.maximum(64, np.clip(raw / raw.mean() * mean, 64, 4 * mean))
    return np.maximum(64, lengths * (mean / lengths.mean())).astype(np.int64)


def make_trajectories(lengths: Sequence[int] | np.ndarray, seed: int = 1) -> list[Trajectory]:
    """One trajectory per length: a prompt of a tenth, the rest sampled at version 0 in four calls."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = np.arange(length) >= length // 10
        made.append(
            Trajectory(
                policy="actor",
                branch=0,
                parent_branch=-1,
                fork_at=0,
                token_ids=rng.integers(0, 150_000, length, dtype=np.int32),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -rng.random(length, np.float32), np.float32(0)),
                versions=np.where(mask, 0, -1).astype(np.int32),
                call_index=np.where(mask, np.arange(length) * 4 // length, -1).astype(np.int16),
                reward=float(rng.random()),
            )
        )
    return made


@dataclass
class Service:
    """A running dataflow process."""

    url: str
    start_s: float  # from the start of the process until /health answered
    process: psutil.Process
    run_dir: Path

    def rss_mb(self) -> float:
        """Resident memory in MB (10**6)."""
        return float(self.process.memory_info().rss) / 1e6

    def cpu_s(self) -> float:
        """User and system time so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def service(folder: Path, run_file: str) -> Iterator[Service]:
    """`astraflow dataflow` on a fresh run directory in `folder`, until the block ends."""
    folder.mkdir(parents=True)
    recipe, ready = folder / "run.toml", folder / "ready.json"
    recipe.write_text(run_file)
    command = [sys.executable, "-m", "astraflow", "dataflow", str(recipe), f"--run-dir={folder / 'run'}"]
    said = folder / "service.log"
    begin = time.perf_counter()
    with said.open("wb") as log:
        child = subprocess.Popen([*command, f"--ready-file={ready}"], stdout=log, stderr=subprocess.STDOUT)
    try:
        while (url := read_ready(ready, child.pid)) is None:
            if child.poll() is not None or time.perf_counter() - begin > 60:
                raise SystemExit(f"the service did not start:\n{said.read_text()[-3000:]}")
            time.sleep(0.002)
        urllib3.request("GET", f"{url}/health")
        yield Service(url, time.perf_counter() - begin, psutil.Process(child.pid), folder / "run")
    finally:
        child.terminate()
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Loop:
    """One node and one trainer of a service, in this process: the calls that are timed."""

    def __init__(self, url: str) -> None:
        self.client = DataflowClient(url)
        run_id = self.client.run().run_id
        self.node = uuid.uuid4().hex
        self.client.join(m.Join(node_id=self.node, name="bench", capacity=1024, run_id=run_id))
        self.client.resume("actor", m.Resume(trainer_id="t", version=0, urls=(), run_id=run_id))
        self.version = 0

    def lease(self, n: int) -> list[EpisodeLease]:
        """Exactly `n` episodes."""
        got: list[EpisodeLease] = []
        while len(got) < n:
            more = self.client.lease(self.node, n - len(got), wait_s=5.0).leases
            if not more:
                raise SystemExit(f"leases={len(got)} must be {n}; the gate of the run file is too small")
            got += more
        return got

    def episodes(self, rows: Sequence[Trajectory]) -> list[Episode]:
        """One finished episode of one trajectory each, sampled at the newest version."""
        fresh = [replace(row, versions=np.where(row.loss_mask, self.version, -1).astype(np.int32)) for row in rows]
        return [
            Episode(episode_id=x.episode_id, attempt=x.attempt, node_id=self.node, task=x.task, trajectories=[row])
            for x, row in zip(self.lease(len(rows)), fresh, strict=True)
        ]

    def commit(self, episodes: Sequence[Episode]) -> float:
        """Milliseconds of one put."""
        begin = time.perf_counter()
        answers = self.client.commit(episodes)
        took = time.perf_counter() - begin
        if set(answers.values()) != {"accepted"}:
            raise SystemExit(f"commit={answers} must be accepted")
        return 1e3 * took

    def get(self, wait_s: float = 0.0) -> tuple[Any, Any, float]:
        """Header, table and milliseconds of one get."""
        begin = time.perf_counter()
        got = self.client.batch("actor", "t", self.version, wait_s=wait_s)
        took = time.perf_counter() - begin
        if got is None:
            raise SystemExit("batch=none must be full; the benchmark committed too little")
        return got[0], got[1], 1e3 * took

    def done(self, header: Any) -> None:
        """The batch was trained, and a checkpoint covers it."""
        self.client.ack(header, "t")
        self.version = header.step
        self.client.checkpoint("actor", "t", self.version)


def stats(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest, in ms."""
    return {
        "median_ms": round(statistics.median(values), 3), "min_ms": round(min(values), 3),
        "max_ms": round(max(values), 3), "n": len(values),
    }  # fmt: skip


def timed(repeat: int, call: Callable[[], Any]) -> list[float]:
    """Milliseconds of each repetition after one that does not count."""
    taken = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begin))
    return taken[1:]
