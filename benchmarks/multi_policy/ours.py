"""Our side: `astraflow run` of the run file, real services, until both policies are at the target."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.testing.runs import LaunchedRun, wait_until
from benchmarks.multi_policy.hardware import GPUS, SCALE
from benchmarks.multi_policy.sides import POLICIES, ROLLOUT_GPUS, RUN_FILE, last, reached, words

READY_S = 120.0


@dataclass
class _Steps:
    """What metrics.jsonl says, and when it was first seen to say so."""

    run: LaunchedRun
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    moments: list[float] = field(default_factory=list)  # of steps that all policies have made

    def read(self) -> None:
        """Take in what is new."""
        now = time.time()
        found = [row for row in self.run.metrics() if row["kind"] == "step"]
        self.rows = {name: [row for row in found if row["policy"] == name] for name in POLICIES}
        common = min(map(len, self.rows.values()))
        self.moments += [now] * (common - len(self.moments))

    def rewards(self) -> list[dict[str, float]]:
        """Of every policy, by step, as far as all have come."""
        return [
            {name: rows[step]["reward/mean"] for name, rows in self.rows.items()} for step in range(len(self.moments))
        ]

    def mean(self, metric: str) -> float:
        """Over all steps of all policies."""
        return statistics.mean(row[metric] for rows in self.rows.values() for row in rows if metric in row)


@dataclass(frozen=True)
class Limits:
    """When it ends."""

    until: float
    seconds: float


def run_ours(
    folder: Path, start: Path, seed: int, staleness: int, limits: Limits, real: bool = False
) -> dict[str, Any]:
    """The row of one run. The clock starts when the node can play, as the loop's does."""
    options = [*words(start, seed), *_options(staleness, real)]
    run = LaunchedRun.start(folder, str(RUN_FILE), *options, name=f"s{staleness}-{seed}{'-real' * real}")
    steps = _Steps(run)
    try:
        begin = _began(run)

        def over() -> bool:
            steps.read()
            at_target = reached(steps.rewards(), limits.until)
            return at_target or run.popen.poll() is not None or time.time() - begin > limits.seconds

        wait_until(over, "the target or the time limit", limits.seconds + 60.0)
        run.interrupt()
        run.wait(120.0)
    finally:
        run.end()
    if not steps.moments:
        raise SystemExit(f"the run made no step:\n{run.words()}")
    return _row(steps, begin, limits.until)


def _options(staleness: int, real: bool) -> list[str]:
    options = [f"--policies.{name}.batch.max_staleness={staleness}" for name in POLICIES]
    options.append(f"--workflow.scale={SCALE}")
    if real:
        options += [f"--policies.{name}.engine=local" for name in POLICIES]
        return options + [f"--policies.{name}.algorithm.loss=ppo_clip" for name in POLICIES]
    engine_gpus, trainer_gpus = ROLLOUT_GPUS / len(POLICIES), (GPUS - ROLLOUT_GPUS) / len(POLICIES)
    for name in POLICIES:
        where = f"--policies.{name}"
        options += [f"{where}.engine.gpus={engine_gpus}", f"{where}.engine.scale={SCALE}"]
        options += [f"{where}.algorithm.loss.gpus={trainer_gpus}", f"{where}.algorithm.loss.scale={SCALE}"]
    return options


def _began(run: LaunchedRun) -> float:
    """When the node had joined and all policies had a version: from then on episodes can be played."""
    first = [run.directory / "weights" / name / "0" / "manifest.json" for name in POLICIES]

    def ready() -> bool:
        logs = (run.directory / "logs").glob("node*.log")
        joined = any("playing up to" in log.read_text(errors="replace") for log in logs)
        return run.popen.poll() is not None or (joined and all(path.exists() for path in first))

    wait_until(ready, "the start", READY_S)
    if run.popen.poll() is not None:
        raise SystemExit(f"the run ended before it played:\n{run.words()}")
    return time.time()


def _row(steps: _Steps, begin: float, until: float) -> dict[str, Any]:
    rewards, wall = steps.rewards(), steps.moments[-1] - begin
    newest = max((row for rows in steps.rows.values() for row in rows), key=lambda row: row["time_s"])
    row = {
        "steps": len(rewards), "t_s": wall if reached(rewards, until) else None, "s_per_step": wall / len(rewards),
        "reward": last(rewards), "engine_idle": round(1 - newest["nodes/busy_s"] / wall, 3),
        "trainer_idle": round(1 - _busy(steps, wall), 3), "staleness": round(steps.mean("staleness/mean"), 3),
    }  # fmt: skip
    if "nodes/row_s" in newest:
        row["rows_running"] = round(newest["nodes/row_s"] / wall, 1)
    row["curve"] = [
        [round(t - begin, 2), *(round(r, 3) for r in step.values())]
        for t, step in zip(steps.moments, rewards, strict=True)
    ]
    return row


def _busy(steps: _Steps, wall: float) -> float:
    """Share of the time that trainers are busy, their mean."""
    return statistics.mean(sum(row["perf/busy_s"] for row in rows) / wall for rows in steps.rows.values())
