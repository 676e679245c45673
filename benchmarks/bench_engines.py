"""How fast are the engines, how long does a weight update take, and how true are their logprobs?

| side     | what                                                                                      |
|----------|-------------------------------------------------------------------------------------------|
| embedded | the engine `local`, behind AstraFlow's contract                                           |
| generate | `generate` of transformers: a batch at a time, padded, until its longest reply is there   |
| vllm     | the engine `vllm` (server process and HTTP included), with the vLLM of `--vllm PYTHON`    |

Each side is a process of its own with all cores. All are asked for the same prompts and the same numbers of tokens; as
many run at once as `batch` says. uneven: replies of very different lengths, twice as many as run at once. shared:
siblings of one prompt of 256 tokens.

    python -m benchmarks.bench_engines [--models smollm2,tiny] [--vllm /path/to/python]
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
from benchmarks.engines.work import BATCHES, Work, endless
from benchmarks.harness import Check, Result, run_side
from benchmarks.training.models import smollm2, tiny

DTYPES = ("float32", "bfloat16")
LONGEST = {"smollm2": 160, "tiny": 64}
TINY_BATCHES = (8, 32, 512)
MIN_SPEEDUP, MIN_SHARE, MAX_GAP = 1.5, 0.8, 1e-4
LIMIT_S = 1500.0

Row = dict[str, Any]


def main() -> None:
    """Measure and write `results/engines.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,tiny")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--batches", default="", help="requests at once; empty: those of the model")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vllm", default="", help="a Python interpreter with vLLM")
    args = parser.parse_args()
    settle_torch()  # the sides inherit it
    if not args.vllm:
        print("NOT MEASURED: vllm, for want of --vllm PYTHON")
    rows: list[Row] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="bench-engines-") as place:
        for model in args.models.split(","):
            found = measured(model, Path(place), args)
            rows += found
            checks += checks_of(model, found, args)
    result = Result("engines", {**vars(args), "longest": LONGEST}, rows, checks)
    result.show()
    print(f"wrote {result.write()}")


def measured(model: str, place: Path, args: argparse.Namespace) -> list[Row]:
    """All sides of one model."""
    made = tiny(place) if model == "tiny" else smollm2()
    directory = endless(made, place / f"{model}-endless")
    given = tuple(int(batch) for batch in args.batches.split(",") if batch)
    batches = given or (TINY_BATCHES if model == "tiny" else BATCHES)
    sides = ["embedded", "generate"] + (["vllm"] if args.vllm and model != "tiny" else [])
    rows: list[Row] = []
    for dtype in args.dtypes.split(","):
        for side in sides:
            work = Work(
                side, str(directory), dtype, LONGEST[model], batches, args.repeats, args.threads, args.vllm
            )  # fmt: skip
            found = _run(work)
            rows += [{"model": model, **row} for row in found["rows"]]
            if "gap" in found:
                rows.append({"model": model, "side": side, "dtype": dtype, "kind": "gap, update", **_flat(found)})
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def checks_of(model: str, rows: list[Row], args: argparse.Namespace) -> list[Check]:
    """What must be reached."""
    checks = []
    for dtype in args.dtypes.split(","):
        mine = [row for row in rows if row["dtype"] == dtype]
        speed = {(r["side"], r["kind"], r["batch"]): r["tokens_per_s"] for r in mine if "batch" in r}
        for batch in sorted({batch for _, _, batch in speed if batch > 1}):
            ratio = speed["embedded", "uneven", batch] / speed["generate", "uneven", batch]
            name = f"{model}, {dtype}, uneven, batch {batch}: embedded over generate"
            checks.append(Check.at_least(name, ratio, MIN_SPEEDUP, "x"))
        if model == "smollm2":
            theirs = speed.get(("vllm", "uneven", 32))
            share = speed["embedded", "uneven", 32] / theirs if theirs and ("embedded", "uneven", 32) in speed else None
            checks.append(Check.at_least(f"{model}, {dtype}, batch 32: embedded over vllm", share, MIN_SHARE, "x"))
        if dtype == "float32":
            gap = next(row["gap_p99"] for row in mine if row["side"] == "embedded" and "gap_p99" in row)
            checks.append(Check.at_most(f"{model}, float32: p99 of the logprob gap", gap, MAX_GAP, "nats"))
    return checks


def _flat(found: Row) -> Row:
    gap, update = found["gap"], found["update"]
    return {
        "gap_p50": gap["p50"], "gap_p99": gap["p99"], "gap_max": gap["max"], "gap_tokens": gap["tokens"],
        "update_idle_s": update["idle_s"], "update_running_s": update["running_s"], "ready_s": found["ready_s"],
    }  # fmt: skip


def _run(work: Work) -> Row:
    words = f"--work={json.dumps(asdict(work))}"
    return run_side("benchmarks.engines.side", words, threads=work.threads, limit_s=LIMIT_S)[-1]


if __name__ == "__main__":
    main()
