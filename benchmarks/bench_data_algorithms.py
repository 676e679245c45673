"""How many rollouts does each data algorithm need to reach the same reward on held-out tasks?

All variants of a seed start from the same weights (one warm start per seed) and differ in their operators only. The
reward is that of evaluation rounds: held-out tasks, sampled as in training, the same for all. The reward of training
batches would not do: an algorithm that leaves out solved or hopeless tasks changes it without learning anything. A
rollout is one episode of a group that was trained or dropped when the evaluated version was published; evaluation is
not counted.

    python -m benchmarks.bench_data_algorithms [--seeds 0,1] [--variants vanilla,+greso] [--level 0.85] [--limit 80000]
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.config.env import child_environment
from astraflow.testing.runs import LaunchedRun, astraflow_command, wait_until
from benchmarks.harness import Result

GROUP_SIZE, EVERY, WINDOW = 16, 10, 2  # episodes per group; steps between rounds; rounds of one mean
MAX_RUN_S = 900.0
WARM_START = "--policies.actor.warm_start={source='demos', steps=175, batch=64, lr=2e-3}"
RUN = f"""\
[run]
name = "data-algorithms"
steps = 100000
checkpoint_every = 100000

[sources]
train = {{ type = "calculator" }}
heldout = {{ type = "calculator", split = "heldout" }}
demos = {{ type = "calculator", demos = true, size = 12800 }}

[workflow]
type = "tool_use"
environment = "calculator"
max_turns = 2
group_size = {GROUP_SIZE}

[policies.actor]
model = "tiny-char"
batch = {{ groups = 16, max_staleness = 1 }}
algorithm = {{ loss = "m2po" }}  # for all: replay needs a loss that corrects
sampling = {{ max_tokens = 7 }}
optimizer = {{ lr = 1e-3 }}

[[rollout.nodes]]
concurrency = 256

[evaluation]
source = "heldout"
every = {EVERY}
samples = 4
temperature = 1.0
"""
VARIANTS: dict[str, tuple[str, ...]] = {
    "vanilla": ("--policies.actor.operators=['keep_all']",),
    "zero_variance": ("--policies.actor.operators=['zero_variance']",),
    "+replay 0.3": ("--policies.actor.operators=['zero_variance', {type='replay', ratio=0.3, max_age=4}]",),
    "+greso": ("--policies.actor.operators=['zero_variance']", "--sources.train.operators=['greso']"),
}
"""Overrides of RUN; "+" is added to zero_variance."""


@dataclass(frozen=True)
class Target:
    """When a run ends."""

    level: float  # mean held-out reward of WINDOW rounds
    limit: int  # rollouts


def main() -> None:
    """Measure and write `results/data_algorithms.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--level", type=float, default=0.85, help="held-out reward at which a run ends")
    parser.add_argument("--limit", type=int, default=80_000, help="rollouts at which a run ends that did not reach it")
    args = parser.parse_args()
    names, target = args.variants.split(","), Target(args.level, args.limit)
    if unknown := sorted(set(names) - set(VARIANTS)):
        parser.error(f"--variants={unknown[0]} is not known; known: {', '.join(VARIANTS)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-data-algorithms-") as place:
        recipe = Path(place) / "run.toml"
        recipe.write_text(RUN)
        for seed in map(int, args.seeds.split(",")):
            start = _warm_start(recipe, seed)
            for name in names:
                rows.append(_run(recipe, start, seed, name, target))
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items() if k != "curve"), flush=True)
    result = Result("data_algorithms", vars(args), rows)
    result.show()
    print(f"wrote {result.write()}\n\n{markdown(rows, target)}")


def _warm_start(recipe: Path, seed: int) -> Path:
    """The weights from which all variants of `seed` start."""
    out = recipe.with_name(f"start-{seed}")
    command = astraflow_command("sft", str(recipe), "--out", str(out), f"--run.seed={seed}", WARM_START)
    done = subprocess.run(command, env=child_environment(None), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"the warm start ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return out


def _run(recipe: Path, start: Path, seed: int, name: str, target: Target) -> dict[str, Any]:
    """One variant from `start` until the target or the limit is reached."""
    begin, words = time.monotonic(), (f"--run.seed={seed}", f"--policies.actor.model={start}", *VARIANTS[name])
    run = LaunchedRun.start(recipe.parent, str(recipe), *words, name=f"run-{list(VARIANTS).index(name)}-{seed}")
    size = 0

    def over() -> bool:
        nonlocal size
        file = run.directory / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        if run.popen.poll() is not None:
            return True
        if size == (size := text.count('"kind":"eval"')):
            return False
        points = curve(run.metrics())
        return reached(points, target.level) is not None or points[-1][0] >= target.limit

    try:
        wait_until(over, "the target or the limit", MAX_RUN_S)
        wall = time.monotonic() - begin
        if run.popen.poll() is not None:
            raise SystemExit(f"{name}, seed {seed}: the run ended before its target or limit:\n{run.words()}")
        rows = run.metrics()
    finally:
        run.end()
    return _row(rows, seed, name, target) | {"wall_s": round(wall, 1)}


def curve(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(rollouts behind the evaluated version, its held-out reward) of every whole round."""
    spent = {0: 0} | {
        row["step"]: GROUP_SIZE * int(row["groups/admitted"] - row["groups/in_flight"])
        for row in rows
        if row["kind"] == "step"
    }
    rounds = [row for row in rows if row["kind"] == "eval" and row["step"] in spent]
    return [(spent[row["step"]], row["eval/reward"]) for row in sorted(rounds, key=lambda row: row["step"])]


def reached(points: Sequence[tuple[int, float]], level: float) -> int | None:
    """Rollouts at the first round where the mean of the last WINDOW rounds is at the level; None: nowhere."""
    for i in range(WINDOW, len(points) + 1):
        if statistics.mean(reward for _, reward in points[i - WINDOW : i]) >= level:
            return points[i - 1][0]
    return None


def _row(rows: Sequence[dict[str, Any]], seed: int, name: str, target: Target) -> dict[str, Any]:
    points = curve(rows)
    last = [row for row in rows if row["kind"] == "step"][-1]
    return {
        "variant": name, "seed": seed, "rollouts": reached(points, target.level), "reward": round(points[-1][1], 3),
        "steps": last["step"], "trained": int(last["groups/trained"]), "dropped": int(last["groups/dropped"]),
        "skipped": int(sum(v for k, v in last.items() if k.startswith("sources/train/skipped/"))),
        "replayed": int(last["groups/replayed"]), "curve": {str(at): round(reward, 3) for at, reward in points},
    }  # fmt: skip


def markdown(rows: Sequence[dict[str, Any]], target: Target) -> str:
    """The table of docs/data-algorithms.md. Runs that did not get there count as more than the limit."""
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        f"| algorithm | rollouts to held-out reward {target.level:g}: median | "
        + " | ".join(f"seed {seed}" for seed in seeds)
        + " | against vanilla | of 100 groups rolled out: dropped | skipped before | trained again |",
        "|---|---|" + "---|" * (len(seeds) + 4),
    ]
    base = _median(rows, "vanilla")
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = {row["seed"]: row for row in rows if row["variant"] == name}
        median = _median(rows, name)
        ratio = f"{median / base:.2f}" if math.isfinite(median) and math.isfinite(base) else "-"
        values = [_shown(own[seed]["rollouts"], target.limit) if seed in own else "-" for seed in seeds]
        played = sum(row["trained"] + row["dropped"] for row in own.values())
        shares = [f"{100 * sum(r[key] for r in own.values()) / max(played, 1):.0f}" for key in _SHARES]
        cells = [f"`{name}`", _shown(median, target.limit), *values, ratio, *shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_SHARES = ("dropped", "skipped", "replayed")


def _median(rows: Sequence[dict[str, Any]], name: str) -> float:
    values = [math.inf if row["rollouts"] is None else row["rollouts"] for row in rows if row["variant"] == name]
    return statistics.median(values) if values else math.inf


def _shown(rollouts: float | None, limit: int) -> str:
    return f"> {limit:,}" if rollouts is None or math.isinf(rollouts) else f"{rollouts:,.0f}"


if __name__ == "__main__":
    main()
