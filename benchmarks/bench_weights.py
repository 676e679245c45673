"""What does it cost to move the weights of a step? Changes of real runs, their coding, their way to an engine, chains.

| table         | what is measured                                                                           |
|---------------|--------------------------------------------------------------------------------------------|
| changes       | of each layer type and of each step: share of changed elements, bytes of our delta, of the |
|               | entropy bound and of other codings; GB/s of model of one core, beside memcpy               |
| live          | from the trainer's submit until the engine of another process has the version              |
| chains        | a reader 1, 2, 4, 8 versions behind: deltas one by one, merged by the store, or everything |
| extrapolation | to the models that upstream published figures of                                           |

The versions come from `astraflow run`: SmolLM2-135M in bfloat16 at lr 1e-6 and 5e-6, and the quickstart model, 8 GRPO
steps each. One pair more is what a late step of such a run would be, simulated. Trained versions are kept in --cache,
so that measuring again needs no training.

    python -m benchmarks.bench_weights [--cache runs/bench-weights] [--trainings a,b] [--steps 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.delta_codec import Measured, measure, pooled
from benchmarks.harness import Check, Result, table
from benchmarks.weights import extrapolate, layers
from benchmarks.weights.chains import measure_chains
from benchmarks.weights.late import late_pair, learning_rate
from benchmarks.weights.live import measure_live
from benchmarks.weights.training import TRAININGS, Trained, trained

MAX_EACH, MIN_U32, MIN_U64, MIN_APPLY_GB_S = 2.0, 3.0, 5.0, 1.0
NEAR = (0.007, 0.013)
"""What counts as about 1 % of the elements."""

Rows = dict[str, list[dict[str, Any]]]
WIDTH = 210


def main() -> None:
    """Measure and write `results/weights.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("runs/bench-weights"), help="where trained versions stay")
    parser.add_argument("--trainings", default=",".join(TRAININGS), help="which of them")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="of everything that is timed; the median counts")
    args = parser.parse_args()
    runs = [trained(TRAININGS[name], args.cache.absolute(), args.steps) for name in args.trainings.split(",")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows: Rows = {"changes": [], "live": [], "chains": [], "extrapolation": []}
    measured = {run.name: _measure(run, rows, args.rounds) for run in runs}
    torch.set_num_threads(threads)
    for name, found in measured.items():
        if name.startswith("smollm2"):
            rows["extrapolation"] += extrapolate.rows(name, pooled(found[layers.WHOLE]))
    settings = {
        "steps": args.steps, "rounds": args.rounds, "load_at_start": round(load, 2),
        "runs": {run.name: run.about for run in runs}, "assumptions": extrapolate.ASSUMPTIONS,
    }  # fmt: skip
    flat = [{"table": title, **row} for title, found in rows.items() for row in found]
    result = Result("weights", settings, flat, checks(measured))
    show(rows, result)
    print(f"wrote {result.write()}")


def _measure(run: Trained, rows: Rows, rounds: int) -> dict[str, list[Measured]]:
    versions = run.tensors()
    found = layers.measure_pairs(run, versions, rounds)
    rows["changes"] += layers.rows(run.name, found)
    if (lr := learning_rate(run.training.words)) is not None:
        late = measure(*late_pair(versions[0], lr), rounds)
        rows["changes"].append({
            "training": run.name, "layer": "all, late (simulated)", "elements": late.elements, **late.row(),
        })  # fmt: skip
    place = Path(tempfile.mkdtemp(prefix="bench-weights-"))
    try:
        rows["live"] += measure_live(run, versions, place / "live")
        rows["chains"] += measure_chains(run.name, versions, place / "chains", rounds)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return found


def checks(measured: dict[str, dict[str, list[Measured]]]) -> list[Check]:
    """The figures that the issue asks for: of the pairs with about 1 % of changes, then of each training of SmolLM2."""
    runs = {name: found[layers.WHOLE] for name, found in measured.items() if name.startswith("smollm2")}
    near = [pair for pairs in runs.values() for pair in pairs if NEAR[0] <= pair.changed / pair.elements <= NEAR[1]]
    made = _of("pairs with about 1 % of changes", pooled(near) if near else None)
    for name, pairs in runs.items():
        made += _of(name, pooled(pairs))
    slowest = min((p.nbytes / p.apply_s / 1e9 for pairs in runs.values() for p in pairs), default=None)
    made.append(Check.at_least("apply, slowest pair of SmolLM2, of model per core", slowest, MIN_APPLY_GB_S, "GB/s"))
    return made


def _of(name: str, pair: Measured | None) -> list[Check]:
    def each(value: float) -> float | None:
        return None if pair is None or not pair.changed else value

    delta, changed, u32, u64 = (pair.delta, pair.changed, pair.u32, pair.u64) if pair else (1, 1, 1, 1)
    return [
        Check.at_most(f"bytes per change, {name}", each(delta / max(1, changed)), MAX_EACH, "B"),
        Check.at_least(f"smaller than u32 and value, {name}", each(u32 / delta), MIN_U32, "x"),
        Check.at_least(f"smaller than u64 and value, {name}", each(u64 / delta), MIN_U64, "x"),
    ]


def show(rows: Rows, result: Result) -> None:
    """All tables, wide ones cut by columns."""
    console = Console(width=WIDTH)
    speeds = ("encode GB/s", "apply GB/s", "merge GB/s", "copy GB/s")
    for title, found in rows.items():
        if title == "changes":
            console.print(table("changes: bytes", [{k: v for k, v in r.items() if k not in speeds} for r in found]))
            found = [{k: r[k] for k in ("training", "layer", "full MB", "changed", *speeds)} for r in found]
            title = "changes: gigabytes of model per second of one core"
        console.print(table(title, found))
    for line in extrapolate.ASSUMPTIONS:
        console.print(f"- {line}")
    Result(result.question, {}, [], result.checks).show()


if __name__ == "__main__":
    main()
