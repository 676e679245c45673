"""How fast is one update, and how much memory does it need? Ours, TRL's GRPOTrainer and a plain transformers loop.

| table      | what is measured                                                                                     |
|------------|------------------------------------------------------------------------------------------------------|
| updates    | the same model, sequences, loss and optimizer on every side; lengths uneven (log-normal) and equal; |
|            | our trainer on two ranks of one thread each beside one process of two                                |
| vocabulary | memory of our update and of the plain one with a vocabulary and a batch four times as large          |

Each side is a process of its own with all cores. `peak_mb` is the high-water mark of its resident memory, `memory_mb`
that above the loaded model. The norm of the first gradient must be the same on all sides. Of SmolLM2's batch of 64 rows
each side computes a fair eighth, and TRL pads that to the longest of the 64 as it would with all of them.

    python -m benchmarks.bench_training [--peers .venv-peers/bin/python] [--models tiny,smollm2] [--tables updates]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from astraflow.config.env import child_environment, settle_torch
from benchmarks.harness import Check, Result
from benchmarks.sides import own_python
from benchmarks.training.models import smollm2, tiny
from benchmarks.training.work import Work, command

MIN_OVER_TRL, MIN_OVER_PLAIN, MAX_MEMORY, MAX_GROWTH, MAX_DIFFERENCE = 5.0, 1.0, 1.2, 1.15, 1e-3
VOCABULARIES, BATCHES, SIZE = (50_000, 200_000), (8, 32), 128
LIMIT_S = 400.0
RECOMPUTED = "astraflow, gradient checkpointing"
OURS, PLAIN, TRL = "benchmarks.training.ours", "benchmarks.training.plain", "benchmarks.peers.trl_update"

Row = dict[str, Any]


def main() -> None:
    """Measure and write `results/training.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers/bin/python"), help="Python that has TRL")
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--lengths", default="uneven,equal")
    parser.add_argument("--tables", default="updates,vocabulary")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a batch of the tiny model")
    args = parser.parse_args()
    settle_torch()  # the sides inherit it
    if not args.peers.exists():
        print(f"peers={args.peers} does not exist: TRL is not measured; run `make bench-peers`", flush=True)
    rows: list[Row] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="bench-training-") as place:
        for model in args.models.split(",") if "updates" in args.tables else ():
            for lengths in args.lengths.split(","):
                found = updates(model, lengths, args, Path(place))
                rows += found
                checks += checks_of_updates(model, lengths, found)
        if "vocabulary" in args.tables:
            found = vocabulary(Path(place))
            rows += found
            checks.append(check_of_vocabulary(found))
    result = Result("training", {**vars(args), "peers": str(args.peers)}, rows, checks)
    result.show()
    print(f"wrote {result.write()}")


def updates(model: str, lengths: str, args: argparse.Namespace, place: Path) -> list[Row]:
    """All sides on one batch."""
    said = str(place / f"{model}-{lengths}.safetensors")
    threads = os.cpu_count() or 1
    # About as many tokens at once as the plain loop has in its longest row; small products gain more by larger packs.
    budget = (1024 if lengths == "uneven" else 512) * (2 if model == "tiny" else 1)
    if model == "tiny":
        work = Work(str(tiny(place)), lengths, args.rows, 512, budget=budget, threads=threads, behavior=said)
    else:
        # An update takes half a minute: compiling kernels and the optimizer's first state are nothing beside it.
        work = Work(
            str(smollm2()), lengths, rows=8, of_rows=64, mean=512, micro=2, budget=budget, warm_ups=0, repeats=1,
            threads=threads, behavior=said,
        )  # fmt: skip
    slow = replace(work, repeats=1)
    ours = replace(work, repeats=3 if model == "tiny" else 2)
    about = {"table": "updates", "model": model, "lengths": lengths}
    rows: list[Row] = []
    rows.append(_note({**about, "side": "plain one_by_one", **_run(own_python(), PLAIN, work, "one_by_one")}))
    rows.append(_note({**about, "side": "astraflow", **_run(own_python(), OURS, ours)}))
    rows.append(_note({**about, "side": "plain sorted", **_run(own_python(), PLAIN, slow, "sorted")}))
    if lengths == "uneven":
        rows.append(_note({**about, "side": RECOMPUTED, **_run(own_python(), OURS, slow, "recompute")}))
        rows.append(_note({**about, "side": "astraflow, two ranks", **_run_ranks(slow, place)}))
    if args.peers.exists():
        rows.append(_note({**about, "side": "trl", **_run(str(args.peers), TRL, slow)}))
    return rows


def vocabulary(place: Path) -> list[Row]:
    """Memory of one update for each vocabulary and batch."""
    rows = []
    for size in VOCABULARIES:
        directory = str(tiny(place, size))
        for batch in BATCHES:
            work = Work(directory, "equal", batch, SIZE, micro=batch, budget=4 * SIZE, repeats=1)
            about = {"table": "vocabulary", "vocabulary": size, "rows": batch}
            logits = round(4 * size * SIZE * batch / 2**20)
            for side, module, more in (("astraflow", OURS, ()), ("plain sorted", PLAIN, ("sorted",))):
                if side == "astraflow" or size == VOCABULARIES[0]:  # the plain one would not fit otherwise
                    rows.append(
                        _note({**about, "side": side, "logits_mb": logits, **_run(own_python(), module, work, *more)})
                    )
    return rows


def checks_of_updates(model: str, lengths: str, rows: list[Row]) -> list[Check]:
    """What the issue asks for, and that all sides computed the same."""
    by_side = {row["side"]: row for row in rows}
    plain = max((row for row in rows if row["side"].startswith("plain")), key=lambda row: row["tokens_per_s"])
    ours, trl, name = by_side["astraflow"], by_side.get("trl"), f"{model}, {lengths}"
    norms = [row["grad_norm"] for row in rows]
    checks = [Check.at_most(f"{name}: difference of gradient norms", max(norms) / min(norms) - 1, MAX_DIFFERENCE)]
    for mine in (ours, by_side.get(RECOMPUTED)):
        if mine is not None:
            what = f"{name}: {mine['side']} over the best plain loop"
            checks += [
                Check.at_least(f"{what}, speed", mine["tokens_per_s"] / plain["tokens_per_s"], MIN_OVER_PLAIN, "x"),
                Check.at_most(f"{what}, memory", mine["peak_mb"] / plain["peak_mb"], MAX_MEMORY, "x"),
            ]
    if lengths == "uneven":
        ratio = ours["tokens_per_s"] / trl["tokens_per_s"] if trl else None
        checks.append(Check.at_least(f"{name}: times as fast as TRL", ratio, MIN_OVER_TRL, "x"))
    return checks


def check_of_vocabulary(rows: list[Row]) -> Check:
    """With the large vocabulary, memory of a batch four times as large over that of the small batch."""
    ours = {
        row["rows"]: row["memory_mb"] for row in rows if row["side"] == "astraflow" and row["vocabulary"] == 200_000
    }
    small, large = BATCHES
    return Check.at_most("memory, batch x 4 at a vocabulary of 200,000", ours[large] / ours[small], MAX_GROWTH, "x")


def _run(python: str, module: str, work: Work, *more: str) -> Row:
    return _last_line(_start(command(python, module, work, *more), work.threads), work.directory)


def _run_ranks(work: Work, place: Path) -> Row:
    """Two processes of half the threads each; memory is that of rank 0."""
    half = replace(work, threads=max(1, work.threads // 2))
    meeting = place / "meeting"
    meeting.unlink(missing_ok=True)
    commands = [command(own_python(), OURS, half, str(rank), "2", f"file://{meeting}") for rank in range(2)]
    first, second = (_start(words, half.threads) for words in commands)
    row = _last_line(first, work.directory)
    second.communicate(timeout=LIMIT_S)
    return row


def _start(words: Sequence[str], threads: int) -> subprocess.Popen[str]:
    environment = child_environment(None, {"OMP_NUM_THREADS": str(threads)})
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[1]
    )


def _last_line(process: subprocess.Popen[str], what: str) -> Row:
    try:
        said, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    if process.returncode:
        raise SystemExit(f"{process.args} on {what} ended with exit code {process.returncode}:\n{errors[-3000:]}")
    row: Row = json.loads(said.splitlines()[-1])
    return row


def _note(row: Row) -> Row:
    print(" ".join(f"{key}={value}" for key, value in row.items() if key != "times"), flush=True)
    return row


if __name__ == "__main__":
    main()
