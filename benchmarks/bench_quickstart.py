"""Does the quickstart learn, from every seed, and as well when it is synchronous? The shipped recipe as it is.

One whole run for each seed with the recipe's `max_staleness`, and one with each further value.
Learning is compared step by step, speed by the wall clock. Each run alone.

    python -m benchmarks.bench_quickstart [--seeds 0,1,2] [--staleness 0] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from astraflow.testing.runs import LaunchedRun
from benchmarks.harness import Check, Result

MAX_WALL_S, MIN_SUCCESS, MAX_START, MAX_GAP = 360.0, 0.6, 0.1, 1e-4
MARKS = (10, 20, 40, 60, 80, 100, 150, 200, 300)
WINDOW = 5  # steps of one point of the reward curve


def main() -> None:
    """Measure and write `results/quickstart.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--staleness", default="0", help="further values of max_staleness")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    args = parser.parse_args()
    steps = [f"--run.steps={args.steps}"] if args.steps else []
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows = [_run(seed, None, steps) for seed in seeds]
    rows += [_run(seed, int(value), steps) for value in args.staleness.split(",") if value for seed in seeds]
    asynchronous = rows[: len(seeds)]
    checks = [
        Check.at_least("lowest held-out success at the end", min(r["success_end"] for r in rows), MIN_SUCCESS),
        Check.at_most("highest held-out success at the start", max(r["success_start"] for r in rows), MAX_START),
        Check.at_most("longest run", max(r["wall_s"] for r in asynchronous), MAX_WALL_S, "s"),
        Check.at_most("worst p99 of the logprob gap, engine against trainer", max(r["gap_p99"] for r in rows), MAX_GAP),
    ]
    result = Result("quickstart", vars(args), rows, checks)
    result.show()
    print(f"wrote {result.write()}")


def _run(seed: int, staleness: int | None, words: list[str]) -> dict[str, Any]:
    more = [f"--run.seed={seed}", *words]
    if staleness is not None:
        more.append(f"--policies.actor.batch.max_staleness={staleness}")
    with tempfile.TemporaryDirectory(prefix="bench-quickstart-") as place:
        begin = time.time()
        run = LaunchedRun.start(Path(place), "quickstart", *more)
        try:
            code = run.wait(1200.0)
            wall = time.time() - begin
            if code:
                raise SystemExit(f"the run ended with {code}:\n{run.words()}")
            summary, metrics = run.summary(), run.metrics()
        finally:
            run.end()
    steps = [row for row in metrics if row["kind"] == "step"]
    spent = steps[-1]["time_s"] - steps[0]["time_s"]
    row = {
        "seed": seed, "max_staleness": "recipe" if staleness is None else staleness, "wall_s": round(wall, 1),
        "success_start": summary["success"]["start"], "success_end": summary["success"]["end"],
        "success_best": summary["success"]["best"], "s_per_step": round(spent / max(1, len(steps) - 1), 3),
        "idle_node": round(summary["idle"]["node"], 3), "idle_trainer": round(summary["idle"]["trainer"], 3),
        "staleness_mean": round(summary["staleness"]["mean"], 3), "gap_p99": summary["logprob_gap"]["p99"],
        "dropped": sum(summary["accounting"]["dropped"].values()), "trained": summary["accounting"]["trained"],
    }  # fmt: skip
    row |= {
        f"r{mark}": round(statistics.mean(s["reward/mean"] for s in steps[max(0, mark - WINDOW) : mark]), 3)
        for mark in MARKS
        if mark <= len(steps)
    }
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
