"""How fast is the whole loop? `astraflow run quickstart` against a plain loop and against TRL, on the same work.

All sides of a seed begin from the same weights (version 0 of our run, after its warm start) with a fresh optimizer,
draw from the same problems, and run until the mean reward of three consecutive steps is 0.5. Each runs alone;
the plain loop and TRL are tried with one thread and with as many as there are cores, and the better counts; ours is the
recipe as it is shipped (a trainer and a node, one thread each).

    python -m benchmarks.bench_loop [--seeds 0,1,2] [--seconds 120] [--peers .venv-peers/bin/python] [--no-gateway]

`make bench-peers` makes the environment of TRL; without it that comparison is not measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import bench_gateway
from benchmarks.harness import Check, Result
from benchmarks.sides import Settings, run_other, run_ours, speedup, write_problems

MAX_DATAFLOW_SHARE, MIN_OVER_PLAIN, MIN_OVER_TRL = 0.05, 1.0, 1.3


def main() -> None:
    """Measure and write `results/loop.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of each side's measured part")
    parser.add_argument("--steps", type=int, default=100_000, help="limit of our own run")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers/bin/python"), help="Python that has TRL")
    parser.add_argument("--sides", default="astraflow,plain,trl", help="which to measure; astraflow gives the weights")
    parser.add_argument("--no-gateway", action="store_true", help="leave out the cost of a gateway call")
    parser.add_argument("overrides", nargs="*", help="--section.key=value for our run (after --)")
    args = parser.parse_args()
    sides = args.sides.split(",")
    if "trl" in sides and not args.peers.exists():
        print(f"peers={args.peers} does not exist: TRL is not measured; run `make bench-peers`", flush=True)
        sides.remove("trl")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as place:
        problems = write_problems(Path(place))
        for seed in map(int, args.seeds.split(",")):
            settings = Settings(seed, args.seconds, Path(place), args.steps, args.overrides)
            _measure(settings, sides, str(args.peers), problems, rows)
    gateway = [] if args.no_gateway else bench_gateway.measure(1000, [1, 64])
    result = Result(
        "loop", {**vars(args), "peers": str(args.peers)}, rows + gateway, _checks(rows, gateway, args.seconds)
    )
    Result("loop", {}, rows, []).show()
    Result("one gateway call", {}, gateway, result.checks).show()
    print(f"wrote {result.write()}")


def _measure(settings: Settings, sides: list[str], peers: str, problems: Path, rows: list[dict[str, Any]]) -> None:
    row, start = run_ours(settings)
    _note(rows, row)
    counts = sorted({1, os.cpu_count() or 1})
    for side, python in (("plain", sys.executable), ("trl", peers)):
        if side in sides:
            for threads in counts:
                _note(rows, run_other(side, python, settings, threads, start, problems))


def _note(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    rows.append(row)
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)


def _checks(rows: list[dict[str, Any]], gateway: list[dict[str, Any]], seconds: float) -> list[Check]:
    ours = [row for row in rows if row["side"] == "astraflow"]
    shares = [row["dataflow_cpu_share"] for row in ours if row["dataflow_cpu_share"] is not None]
    checks = [
        Check.at_least("times as fast to reward 0.5 as the plain loop", speedup(rows, "astraflow", "plain", seconds),
                       MIN_OVER_PLAIN, "x"),
        Check.at_least("times as fast to reward 0.5 as TRL", speedup(rows, "astraflow", "trl", seconds),
                       MIN_OVER_TRL, "x"),
        Check.at_most("share of CPU time in dataflow", max(shares) if shares else None, MAX_DATAFLOW_SHARE),
    ]  # fmt: skip
    return checks + (bench_gateway.checks(gateway) if gateway else [])


if __name__ == "__main__":
    main()
