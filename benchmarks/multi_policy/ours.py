"""Our side: `astraflow run` of the run file, real services, until both policies are at the target."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.testing.runs import LaunchedRun, wait_until
from astraflow.types import WeightVersion
from astraflow.weights.client import Fetched, WeightClient
from astraflow.weights.store import FileStore
from benchmarks.multi_policy.hardware import GPUS, SCALE
from benchmarks.multi_policy.playing import evaluate
from benchmarks.multi_policy.sides import POLICIES, ROLLOUT_GPUS, RUN_FILE, Curve, run_config, words

READY_S = 120.0


@dataclass
class _Steps:
    """What metrics.jsonl says, and when it was first seen to say so."""

    run: LaunchedRun
    curve: Curve
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    num: int = 0  # steps that all policies have made

    def read(self) -> bool:
        """Take in what is new; True: it is over."""
        now = time.time()
        found = [row for row in self.run.metrics() if row["kind"] == "step"]
        self.rows = {name: [row for row in found if row["policy"] == name] for name in POLICIES}
        over = False
        for step in range(self.num, min(map(len, self.rows.values()))):
            self.num += 1
            over |= self.curve.step({name: rows[step]["reward/mean"] for name, rows in self.rows.items()}, now)
        return over

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
    steps = _Steps(run, Curve(limits.until, limits.seconds))
    try:
        begin = _began(run)
        steps.curve.begin(begin)

        def over() -> bool:
            return steps.read() or run.popen.poll() is not None or time.time() - begin > limits.seconds

        wait_until(over, "the target or the time limit", limits.seconds + 60.0)
        run.interrupt()
        run.wait(120.0)
    finally:
        run.end()
    if not steps.num:
        raise SystemExit(f"the run made no step:\n{run.words()}")
    config = run_config(start, seed)
    return steps.curve.row(evaluate(config, _versions(run.directory / "weights", steps.num), seed), _facts(steps))


def _versions(weights: Path, num: int) -> Iterator[dict[str, Any]]:
    """The weights of all policies after each step."""
    client = WeightClient()
    held: dict[str, Fetched] = {}
    for version in range(1, num + 1):
        for name in POLICIES:
            url = FileStore(weights, name).url
            held[name] = client.fetch(WeightVersion(name, version, (url,)), held.get(name))
        yield {name: fetched.tensors for name, fetched in held.items()}


def _options(staleness: int, real: bool) -> list[str]:
    options = [f"--policies.{name}.batch.max_staleness={staleness}" for name in POLICIES]
    options += [f"--workflow.scale={SCALE}", "--weights.keep=100000"]
    if real:
        options += [f"--policies.{name}.engine=local" for name in POLICIES]
        return options + [f"--policies.{name}.algorithm.loss.scale=0.0" for name in POLICIES]
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


def _facts(steps: _Steps) -> dict[str, float]:
    wall = steps.curve.wall_s
    newest = max((row for rows in steps.rows.values() for row in rows), key=lambda row: row["time_s"])
    facts = {
        "engine_idle": 1 - newest["nodes/busy_s"] / wall, "trainer_idle": 1 - _busy(steps, wall),
        "staleness": steps.mean("staleness/mean"), "ess": steps.mean("policy/ess"),
    }  # fmt: skip
    return facts | ({"rows_running": newest["nodes/row_s"] / wall} if "nodes/row_s" in newest else {})


def _busy(steps: _Steps, wall: float) -> float:
    """Share of the time that trainers are busy, their mean."""
    return statistics.mean(sum(row["perf/busy_s"] for row in rows) / wall for rows in steps.rows.values())
