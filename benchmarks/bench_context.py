"""What does it cost to train episodes of many calls: once per call, once per branch, or each token once?

| way                     | sequences                                                                            |
|-------------------------|--------------------------------------------------------------------------------------|
| one sequence per call   | no merging: prompt and reply of each call                                            |
| one sequence per branch | linear merging: the whole path of each branch of the context trie                    |
| prefix tree             | the same branches; what they share is computed once per microbatch, forward and back |

All ways train the same tokens on the same prefixes with the same trainer, so the norm of the first gradient must be the
same. Each is a process of its own with all cores.

    python -m benchmarks.bench_context [--models tiny,smollm2] [--workloads linear,forks,groups]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from astraflow.config.env import settle_torch
from benchmarks.context.episodes import Sizes
from benchmarks.context.side import WAYS, Work
from benchmarks.harness import Check, Result, run_side
from benchmarks.training.models import smollm2, tiny

MIN_LINEAR, MIN_FORKS, MAX_DIFFERENCE = 5.0, 2.0, 1e-3
SIZES = {
    "tiny": {
        "linear": Sizes(episodes=8, prompt=64, sampled=32, observed=32),
        "forks": Sizes(episodes=2, prompt=0, sampled=192, observed=64),
        "groups": Sizes(episodes=16, prompt=1024, sampled=128),
    },
    "smollm2": {
        "linear": Sizes(episodes=1, prompt=32, sampled=16, observed=16),
        "forks": Sizes(episodes=1, prompt=0, sampled=48, observed=16),
        "groups": Sizes(episodes=4, prompt=512, sampled=64),
    },
}
BUDGET = {"tiny": 8192, "smollm2": 4096}
LIMIT_S = 600.0

Row = dict[str, Any]


def main() -> None:
    """Measure and write `results/context.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny")
    parser.add_argument("--workloads", default="linear,forks,groups")
    parser.add_argument("--repeats", type=int, default=5, help="updates of the tiny model after the first")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    settle_torch()  # the sides inherit it
    rows: list[Row] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="bench-context-") as place:
        for model in args.models.split(","):
            directory = str(tiny(Path(place)) if model == "tiny" else smollm2())
            for workload in args.workloads.split(","):
                found = compare(model, directory, workload, args)
                rows += found
                checks += checks_of(model, workload, found)
    result = Result("context", {**vars(args), "budget": BUDGET, "sizes": _sizes()}, rows, checks)
    result.show()
    print(f"wrote {result.write()}")


def compare(model: str, directory: str, workload: str, args: argparse.Namespace) -> list[Row]:
    """All ways on the same calls."""
    repeats = args.repeats if model == "tiny" else 0  # of SmolLM2 the first counts: kernels are nothing beside it
    rows = []
    for way in WAYS:
        work = Work(directory, workload, way, asdict(SIZES[model][workload]), BUDGET[model], repeats, args.threads)
        rows.append({"model": model, "workload": workload, "way": way, **_run(work)})
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items() if key != "times"), flush=True)
    return rows


def checks_of(model: str, workload: str, rows: list[Row]) -> list[Check]:
    """What must be reached, and that all ways did the same."""
    seconds = {row["way"]: row["seconds"] for row in rows}
    norms, trained = [row["grad_norm"] for row in rows], {row["trained_tokens"] for row in rows}
    per_call, per_branch, tree = (seconds[way] for way in WAYS)
    name = f"{model}, {workload}"
    checks = [
        Check.at_most(f"{name}: difference of gradient norms", max(norms) / min(norms) - 1, MAX_DIFFERENCE),
        Check.at_most(f"{name}: different numbers of trained tokens", len(trained) - 1, 0),
    ]
    if workload == "linear":
        checks.append(Check.at_least(f"{name}: tree over no merging", per_call / tree, MIN_LINEAR, "x"))
    if workload == "forks":
        checks.append(Check.at_least(f"{name}: tree over linear merging", per_branch / tree, MIN_FORKS, "x"))
    return checks


def _sizes() -> dict[str, Any]:
    return {model: {name: asdict(sizes) for name, sizes in found.items()} for model, found in SIZES.items()}


def _run(work: Work) -> Row:
    words = f"--work={json.dumps(asdict(work))}"
    return run_side("benchmarks.context.side", words, threads=work.threads, limit_s=LIMIT_S)[-1]


if __name__ == "__main__":
    main()
