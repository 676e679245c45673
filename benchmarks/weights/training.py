"""Versions of real runs: `astraflow run` with few steps, whose weight store is kept for as often as it is measured."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from astraflow.config.env import cache_dir
from astraflow.models.registry import model_directory
from astraflow.testing.runs import LaunchedRun
from astraflow.weights.store import FileStore
from benchmarks.harness import commit

LIMIT_S = 1800.0
ACTOR = "policies.actor"
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """What is trained. `name` is the directory, and how rows call it."""

    name: str
    recipe: str
    model: str
    words: tuple[str, ...]  # beside those of all trainings


def _smollm2(lr: str) -> Training:
    words = (f"--{ACTOR}.optimizer.lr={lr}", f"--{ACTOR}.trainer.dtype=bfloat16")
    return Training(f"smollm2-lr{lr}", "smollm2-arithmetic", "smollm2-135m-instruct", words)


def _quickstart(dtype: str) -> Training:
    return Training(f"quickstart-{dtype}", "quickstart", "tiny-char", (f"--{ACTOR}.trainer.dtype={dtype}",))


TRAININGS = {
    training.name: training
    for training in (_smollm2("1e-6"), _smollm2("5e-6"), _quickstart("float32"), _quickstart("bfloat16"))
}


@dataclass(frozen=True)
class Trained:
    """The versions 0 to `steps` of a run."""

    training: Training
    store: FileStore
    about: dict[str, Any]  # of the run: commit, reward, seconds per step

    @property
    def name(self) -> str:
        """Of the training."""
        return self.training.name

    def tensors(self) -> list[Tensors]:
        """Of each version, in memory of their own."""
        versions = (self.store.fetch(version) for version in self.store.versions())
        return [{name: tensor.clone() for name, tensor in version.items()} for version in versions]

    def model_dir(self) -> Path:
        """The model that the run began with, which an engine is started from."""
        return model_directory(self.training.model, cache_dir(), 0)


def trained(training: Training, cache: Path, steps: int) -> Trained:
    """Train, unless `cache` has these versions already."""
    place = cache / f"{training.name}-{steps}"
    note = place / "trained.json"
    if not note.exists():
        shutil.rmtree(place, ignore_errors=True)
        about = _train(training, place, steps)
        note.write_text(json.dumps(about, indent=1) + "\n")
    return Trained(training, FileStore(place / "weights", "actor"), json.loads(note.read_text()))


def _train(training: Training, place: Path, steps: int) -> dict[str, Any]:
    words = [
        *training.words, f"--run.steps={steps}",
        "--run.checkpoint_every=1000", f"--{ACTOR}.optimizer.schedule=constant",
        "--weights.deltas=false", f"--weights.keep={steps + 2}",  # a cache that knows nothing of the codec
        "--evaluation.every=1000", "--evaluation.num_tasks=1",
    ]  # fmt: skip
    print(f"training {training.name}: astraflow run {training.recipe} {' '.join(words)}", flush=True)
    begin = time.time()
    run = LaunchedRun.start(place.parent, training.recipe, *words, name=place.name)
    try:
        if code := run.wait(LIMIT_S):
            raise SystemExit(f"the run ended with {code}:\n{run.words()}")
    finally:
        run.end()
    shutil.rmtree(place / "checkpoints", ignore_errors=True)
    rows = [row for row in run.metrics() if row["kind"] == "step"]
    return {
        "commit": commit(), "words": words, "wall_s": round(time.time() - begin, 1), "steps": len(rows),
        "s_per_step": round(statistics.median(row["perf/step_s"] for row in rows), 2),
        "tokens_per_step": round(statistics.mean(row["tokens"] for row in rows)),
        "grad_norm": [round(row["grad_norm"], 3) for row in rows],
        "reward": [round(row["reward/mean"], 3) for row in rows],
    }  # fmt: skip
