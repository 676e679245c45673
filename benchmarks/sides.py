"""The sides of `bench_loop`, each run to reward 0.5 (or out of time) in processes of its own, each giving one row."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.testing.runs import LaunchedRun, wait_until
from benchmarks.cpu_share import CpuWatch
from benchmarks.harness import run_side

TARGET, WINDOW = 0.5, 3  # time to this mean reward of this many consecutive steps
POLL_S = 0.05


@dataclass(frozen=True)
class Settings:
    """What all sides share."""

    seed: int
    seconds: float  # limit of the measured part
    folder: Path  # for run directories and problem lists
    steps: int = 100_000  # limit of our own run; the others are stopped by time and target
    words: Sequence[str] = ()  # more overrides of the recipe


@dataclass
class Steps:
    """Rows of a run's metrics with the moment each was first seen."""

    run: LaunchedRun
    moments: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        """Take in new rows."""
        now = time.time()
        new = [row for row in self.run.metrics() if row["kind"] == "step"][len(self.rows) :]
        self.rows += new
        self.moments += [now] * len(new)

    def reached(self) -> bool:
        """The mean reward of the last WINDOW steps is at the target."""
        last = [row["reward/mean"] for row in self.rows[-WINDOW:]]
        return len(last) == WINDOW and statistics.mean(last) >= TARGET

    def mean(self, name: str) -> float | None:
        """Mean of a metric over all steps that have it."""
        values = [row[name] for row in self.rows if row.get(name) is not None]
        return round(statistics.mean(values), 4) if values else None


def run_ours(settings: Settings) -> tuple[dict[str, Any], Path]:
    """`astraflow run quickstart` without evaluation; the row, and the checkpoint of version 0 (the others start there).

    The clock starts when version 0 is on disk: the optimizer is fresh and nothing was sampled yet.
    """
    run = LaunchedRun.start(
        settings.folder, "quickstart", f"--run.steps={settings.steps}", f"--run.seed={settings.seed}",
        "--run.checkpoint_every=100000", "--evaluation.every=100000", "--evaluation.num_tasks=1",
        "--policies.actor.optimizer.schedule=constant", "--policies.actor.optimizer.weight_decay=0.0",
        "--workflow.environment=calculator",  # schedule and reward as of the others
        "--sources.demos.right=0.08",  # the shipped start is at the target within ten steps, too few to compare speeds
        *settings.words,
        name=f"ours-{settings.seed}",
    )  # fmt: skip
    watch = CpuWatch(run.popen.pid)
    start_at = run.directory / "checkpoints" / "actor" / "step-000000"
    version_0 = run.directory / "weights" / "actor" / "0" / "manifest.json"
    try:
        wait_until(lambda: version_0.exists() or run.popen.poll() is not None, "the warm start", 300.0)
        if run.popen.poll() is not None:
            raise SystemExit(f"the run ended before it trained:\n{run.words()}")
        start = version_0.stat().st_mtime
        steps = Steps(run)

        def over() -> bool:
            steps.read()
            return steps.reached() or run.popen.poll() is not None or time.time() - start > settings.seconds

        wait_until(over, "the target or the time limit", settings.seconds + 60.0)
        cpu = watch.between(start, time.time())
        run.interrupt()
        run.wait(120.0)
    finally:
        watch.stop()
        run.end()
    if not steps.rows:
        raise SystemExit(f"the run made no step:\n{run.words()}")
    return _our_row(settings, steps, start, cpu), start_at


def _our_row(settings: Settings, steps: Steps, start: float, cpu: dict[str, float]) -> dict[str, Any]:
    wall = steps.moments[-1] - start
    total = sum(cpu.values())
    rows = steps.rows
    return {
        "side": "astraflow", "seed": settings.seed, "threads": "1+1", "steps": len(rows),
        "t_half": round(wall, 1) if steps.reached() else None, "steps_per_s": round(len(rows) / wall, 3),
        "episodes_per_s": round(sum(row["batch/episodes"] for row in rows) / wall, 1),
        "tokens_per_s": round(sum(row["tokens/sampled"] for row in rows) / wall),
        "first": round(rows[0]["reward/mean"], 3),
        "last": round(statistics.mean(row["reward/mean"] for row in rows[-5:]), 3),
        "dataflow_cpu_share": round(cpu.get("dataflow", 0.0) / total, 4) if total else None,
        "cpu_s": {role: round(seconds, 1) for role, seconds in cpu.items()},
        "cores_used": round(total / wall, 2), "trainer_idle": steps.mean("perf/idle_fraction"),
        "node_idle": _node_idle(rows, wall), "staleness": steps.mean("staleness/mean"),
    }  # fmt: skip


def _node_idle(rows: Sequence[dict[str, Any]], wall: float) -> float | None:
    """From the engine's total busy time: heartbeats come too seldom for a mean over short steps."""
    busy = [row["nodes/busy_s"] for row in rows if row.get("nodes/busy_s") is not None]
    return round(1 - busy[-1] / wall, 4) if busy else None


def write_problems(folder: Path) -> Path:
    """The train split of the recipe as a list for the other sides, so that all train on the same problems."""
    from astraflow.sources.calculator import CalculatorSource

    source = CalculatorSource(split="train")
    path = folder / "problems.json"
    path.write_text(json.dumps([(row["text"], row["answer"]) for row in map(source.row, range(len(source)))]))
    return path


def run_other(
    side: str, python: str, settings: Settings, threads: int, start: Path | None = None, problems: Path | None = None
) -> dict[str, Any]:
    """`plain` or `trl` in the interpreter `python`; `start`: weights to begin from instead of its own warm start."""
    module = {"plain": "benchmarks.plain_loop", "trl": "benchmarks.peers.trl_grpo"}[side]
    words = [
        f"--seed={settings.seed}", f"--seconds={settings.seconds}", f"--threads={threads}", f"--until={TARGET}",
        *([f"--start={start}"] if start is not None else []),
        *([f"--problems={problems}"] if problems is not None else []),
    ]  # fmt: skip
    last = run_side(module, *words, python=python, threads=threads, limit_s=settings.seconds + 300.0)[-1]
    kept = ("steps", "t_half", "steps_per_s", "episodes_per_s", "tokens_per_s", "first", "last", "rss_mb")
    return {"side": side, "seed": settings.seed, "threads": threads, **{key: last[key] for key in kept}}


def best_times(rows: Sequence[dict[str, Any]], side: str) -> dict[int, float]:
    """Per seed the shortest time to the target over thread counts; seeds that never reached it are left out."""
    found: dict[int, float] = {}
    for row in rows:
        if row["side"] == side and row["t_half"] is not None:
            found[row["seed"]] = min(row["t_half"], found.get(row["seed"], float("inf")))
    return found


def speedup(rows: Sequence[dict[str, Any]], ours: str, other: str, seconds: float) -> float | None:
    """Geometric mean over seeds of other's time to the target over ours; None: a side was not measured.

    Who does not reach the target counts with the time limit: a lower bound of its time.
    """
    seeds = sorted({row["seed"] for row in rows if row["side"] == other})
    if not seeds or not any(row["side"] == ours for row in rows):
        return None
    mine, theirs = best_times(rows, ours), best_times(rows, other)
    return statistics.geometric_mean(theirs.get(seed, seconds) / mine.get(seed, seconds) for seed in seeds)
