"""One way to train the captured calls, in a process of its own: updates of the trainer's own `Stepper`.

python -m benchmarks.context.side --work '{...}'
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

import torch

import astraflow.models.scoring.trees.prefixes as prefixes
from astraflow.algorithms.losses.reinforce import Reinforce
from astraflow.config.schema import OptimizerSection
from astraflow.models.load import load_model
from astraflow.models.scoring.packing import pack_rows
from astraflow.training.step import Stepper, StepSettings
from benchmarks.context.episodes import Sizes, episodes, one_per_branch, one_per_call
from benchmarks.training.work import status_mb

WAYS = ("one sequence per call", "one sequence per branch", "prefix tree")


@dataclass(frozen=True)
class Work:
    """One update of the model in `directory` on the calls of `workload`, trained in one of `WAYS`."""

    directory: str
    workload: str
    way: str
    sizes: dict[str, int]
    budget: int  # tokens of a microbatch
    repeats: int
    threads: int


def run(work: Work) -> dict[str, object]:
    """Median seconds of an update, tokens computed, and the norm of the first gradient."""
    torch.manual_seed(0)
    torch.set_num_threads(work.threads)
    model = load_model(work.directory)
    played = episodes(work.workload, Sizes(**work.sizes), model.config.vocab_size)
    if work.way != WAYS[2]:
        prefixes.JOIN = 0  # nothing is worth sharing
    rows = (one_per_call if work.way == WAYS[0] else one_per_branch)(played)
    packs = pack_rows(rows, work.budget)
    optimizer = OptimizerSection(lr=1e-6, grad_clip=1.0, schedule="constant")
    stepper = Stepper(model, Reinforce(), StepSettings(optimizer, total_steps=1000, tokens_per_microbatch=work.budget))
    torch.set_num_threads(work.threads)  # a library may have changed it
    norms, times = [], []
    for _ in range(1 + work.repeats):
        begin = time.perf_counter()
        norms.append(stepper.step(rows, 0)["grad_norm"])
        times.append(time.perf_counter() - begin)
    return {
        "calls": sum(map(len, played)), "sequences": sum(len(pack.rows) for pack in packs), "packs": len(packs),
        "trained_tokens": sum(pack.num_targets for pack in packs),
        "computed_tokens": sum(pack.num_computed for pack in packs),
        "seconds": round(statistics.median(times[1:] or times), 4),
        "peak_mb": int(status_mb("VmHWM")), "grad_norm": round(norms[0], 6),
        "times": {str(i): round(t, 4) for i, t in enumerate(times)},
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=json.loads, required=True)
    sys.stdout.write(json.dumps(run(Work(**parser.parse_args().work))) + "\n")
