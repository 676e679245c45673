"""How fast is one update, and how much memory does it need? Ours, TRL's GRPOTrainer and a plain transformers loop.

| table      | what is measured                                                                                     |
|------------|------------------------------------------------------------------------------------------------------|
| updates    | the same model, sequences, loss and optimizer on every side; lengths uneven (log-normal) and equal; |
|            | our trainer on two ranks of one thread each beside one process of two                                |
| vocabulary | memory of our update and of the plain ones with a vocabulary and a batch four times as large         |

Each side is a process of its own with all cores. `peak_mb` is the high-water mark of its resident memory, `memory_mb`
that above the loaded model and its optimizer. The norm of the first gradient must be the same on all sides. Of
SmolLM2's batch of 64 rows each side computes a fair eighth, and TRL pads that to the longest of the 64 as it would with
all of them.

    python -m benchmarks.bench_training [--peers .venv-peers/bin/python] [--models tiny,smollm2] [--tables updates]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from astraflow.config.env import settle_torch
from benchmarks.harness import Check, Result, run_side
from benchmarks.training.models import smollm2, tiny
from benchmarks.training.work import Work

MIN_OVER_TRL, MIN_OVER_PLAIN, MAX_MEMORY, MAX_GROWTH, MAX_DIFFERENCE = 5.0, 1.0, 1.2, 1.15, 1e-3
VOCABULARIES, BATCHES, SIZE = (50_000, 200_000), (8, 32), 128
# Tokens of a pack: about as many as each form of the plain loop has at once, its longest row and its padded microbatch.
PACKS = {
    ("tiny", "uneven"): (2048, 4096), ("tiny", "equal"): (1024, 4096),
    ("smollm2", "uneven"): (1024, 2048), ("smollm2", "equal"): (512, 1024),
}  # fmt: skip
LIMIT_S = 400.0
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
            checks += checks_of_vocabulary(found)
    result = Result("training", {**vars(args), "peers": str(args.peers)}, rows, checks)
    result.show()
    print(f"wrote {result.write()}")


def updates(model: str, lengths: str, args: argparse.Namespace, place: Path) -> list[Row]:
    """All sides on one batch."""
    said = str(place / f"{model}-{lengths}.safetensors")
    threads = os.cpu_count() or 1
    small, large = PACKS[model, lengths]
    if model == "tiny":
        work = Work(str(tiny(place)), lengths, args.rows, 512, said, budget=small, threads=threads)
        once = replace(work, repeats=1)
    else:  # an update takes half a minute: kernels that are compiled in it are nothing beside that
        once = work = Work(
            str(smollm2()), lengths, 8, 512, said, of_rows=64, micro=2, budget=small, warm_ups=0, repeats=1,
            threads=threads,
        )  # fmt: skip
    rows: list[Row] = []

    def note(side: str, found: Row) -> None:
        rows.append(_note({"table": "updates", "model": model, "lengths": lengths, "side": side, **found}))

    note("plain one_by_one", _run(sys.executable, PLAIN, work, "one_by_one"))
    note("plain sorted", _run(sys.executable, PLAIN, work, "sorted"))
    note("astraflow, small packs", {"pack": small, **_run(sys.executable, OURS, work)})
    note("astraflow, large packs", {"pack": large, **_run(sys.executable, OURS, replace(work, budget=large))})
    if lengths == "uneven":
        note("astraflow, gradient checkpointing", {"pack": small, **_run(sys.executable, OURS, once, "recompute")})
        note("astraflow, two ranks", {"pack": small, **_run_ranks(once, place)})
    if args.peers.exists():
        note("trl", _run(str(args.peers), TRL, once))
    return rows


def vocabulary(place: Path) -> list[Row]:
    """Memory of one update for each vocabulary and batch."""
    rows = []
    for size in VOCABULARIES:
        directory = str(tiny(place, size))
        for batch in BATCHES:
            said = str(place / f"{size}-{batch}.safetensors")
            repeats = 2 * BATCHES[-1] // batch - 1  # as many passes whatever the batch: the heap's holes come with them
            work = Work(directory, "equal", batch, SIZE, said, micro=batch, budget=4 * SIZE, repeats=repeats)
            about = {"table": "vocabulary", "vocabulary": size, "rows": batch}
            logits = round(4 * size * SIZE * batch / 2**20)
            # All rows at once do not fit with the large vocabulary.
            forms = ("one_by_one", "sorted") if size == VOCABULARIES[0] else ("one_by_one",)
            sides = (*((f"plain {form}", PLAIN, (form,)) for form in forms), ("astraflow", OURS, ()))
            for side, module, more in sides:
                found = _run(sys.executable, module, work, *more)
                rows.append(_note({**about, "side": side, "logits_mb": logits, **found}))
    return rows


def checks_of_updates(model: str, lengths: str, rows: list[Row]) -> list[Check]:
    """What the issue asks for, against each form of the plain loop at its memory; and that all sides did the same."""
    by_side = {row["side"]: row for row in rows}
    name = f"{model}, {lengths}"
    checks = [_check_of_norms(name, rows)]
    for mine, other in (("small packs", "one_by_one"), ("large packs", "sorted")):
        ours, plain = by_side[f"astraflow, {mine}"], by_side[f"plain {other}"]
        speed, memory = (ours[key] / plain[key] for key in ("tokens_per_s", "peak_mb"))
        checks += [
            Check.at_least(f"{name}: {mine} over plain {other}, speed", speed, MIN_OVER_PLAIN, "x"),
            Check.at_most(f"{name}: {mine} over plain {other}, memory", memory, MAX_MEMORY, "x"),
        ]
    if lengths == "uneven":
        trl, ours = by_side.get("trl"), by_side["astraflow, large packs"]
        ratio = ours["tokens_per_s"] / trl["tokens_per_s"] if trl else None
        checks.append(Check.at_least(f"{name}: times as fast as TRL", ratio, MIN_OVER_TRL, "x"))
    return checks


def checks_of_vocabulary(rows: list[Row]) -> list[Check]:
    """With the large vocabulary, memory of a batch four times as large over that of the small batch; and that all sides
    did the same."""
    checks = [
        _check_of_norms(
            f"vocabulary {size}, {batch} rows", [r for r in rows if (r["vocabulary"], r["rows"]) == (size, batch)]
        )
        for size in VOCABULARIES
        for batch in BATCHES
    ]
    ours = {
        row["rows"]: row["memory_mb"]
        for row in rows
        if row["side"] == "astraflow" and row["vocabulary"] == VOCABULARIES[-1]
    }
    small, large = BATCHES
    name = f"memory, batch x 4 at a vocabulary of {VOCABULARIES[-1]:,}"
    return [*checks, Check.at_most(name, ours[large] / ours[small], MAX_GROWTH, "x")]


def _check_of_norms(name: str, rows: list[Row]) -> Check:
    norms = [row["grad_norm"] for row in rows]
    return Check.at_most(f"{name}: difference of gradient norms", max(norms) / min(norms) - 1, MAX_DIFFERENCE)


def _run(python: str, module: str, work: Work, *more: str) -> Row:
    return _lines(python, module, work, *more)[-1]


def _lines(python: str, module: str, work: Work, *more: str) -> list[Row]:
    words = ("--work", json.dumps(asdict(work)), *more)
    return run_side(module, *words, python=python, threads=work.threads, limit_s=LIMIT_S)


def _run_ranks(work: Work, place: Path) -> Row:
    """Two processes of half the threads each; memory is that of rank 0."""
    half = replace(work, threads=max(1, work.threads // 2))
    meeting = place / "meeting"
    meeting.unlink(missing_ok=True)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_lines, sys.executable, OURS, half, str(r), "2", f"file://{meeting}") for r in range(2)]
        first, _ = (rank.result() for rank in ranks)
    return first[-1]


def _note(row: Row) -> Row:
    print(" ".join(f"{key}={value}" for key, value in row.items() if key != "times"), flush=True)
    return row


if __name__ == "__main__":
    main()
