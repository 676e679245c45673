"""How fast does TRL's GRPOTrainer learn the calculator task? On its own, from its own warm start.

    .venv-peers as in peers/README.md;  python -m benchmarks.bench_peers [--seeds 0,1,2] [--seconds 120]

`bench_loop` measures TRL beside our loop from equal weights; this file is for TRL and the plain loop alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import Check, Result
from benchmarks.sides import Settings, run_other, speedup


def main() -> None:
    """Measure and write `results/peers.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of each run")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers/bin/python"), help="Python that has TRL")
    args = parser.parse_args()
    if not args.peers.exists():
        raise SystemExit(
            f"peers={args.peers} does not exist; run `make bench-peers`, or see benchmarks/peers/README.md"
        )
    rows: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        settings = Settings(seed, args.seconds, Path("."))
        for threads in sorted({1, os.cpu_count() or 1}):
            for side, python in (("plain", sys.executable), ("trl", str(args.peers))):
                rows.append(run_other(side, python, settings, threads))
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    ratio = speedup(rows, "plain", "trl", args.seconds)
    check = Check.at_least("plain loop, times as fast to reward 0.5 as TRL", ratio, 1.0, "x")
    result = Result("peers", {**vars(args), "peers": str(args.peers)}, rows, [check])
    result.show()
    print(f"wrote {result.write()}")


if __name__ == "__main__":
    main()
