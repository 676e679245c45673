"""What all sides share: start weights, target, and the row that a run leaves."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.config.env import child_environment
from astraflow.config.load import load_run
from astraflow.config.schema import RunConfig
from astraflow.testing.runs import astraflow_command

TOP = Path(__file__).parents[2]
POLICIES = ("actor", "verifier")
RUN_FILE = Path(__file__).parent / "run.toml"
ROLLOUT_GPUS = 4  # where rollout and training have GPUs of their own: of both policies together
WINDOW = 5  # steps of which the mean must be at the target, of each policy
MARGIN = 0.05  # a run goes on until its own batches are this much above the target, so that its weights are beyond it


def words(start: Path, seed: int) -> list[str]:
    """Overrides of the run file: start weights and seed."""
    own = [f"--policies.{name}.{rest}" for name in POLICIES for rest in (f"model={start / name}", "warm_start=none")]
    return [f"--run.seed={seed}", *own]


def run_config(start: Path, seed: int, more: Sequence[str] = ()) -> RunConfig:
    """The run file as a side plays it."""
    return load_run(RUN_FILE, [*words(start, seed), *more])


def warm_start(folder: Path, seed: int) -> Path:
    """A model directory for each policy after its warm start, in `folder`; one that is there is taken as it is."""
    for name in POLICIES:
        if (folder / name / "model.safetensors").exists():
            continue
        command = astraflow_command("sft", str(RUN_FILE), "--policy", name, "--out", str(folder / name))
        command += [f"--run.seed={seed}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=child_environment(None))
        if done.returncode:
            raise SystemExit(f"the warm start of {name} failed:\n{done.stderr[-3000:]}")
    return folder


@dataclass
class Curve:
    """Of all sides alike: after each step, when the new weights of all policies were there, and what was earned in the
    episodes that it trained on. `until`: the target of each policy; None: only time ends it."""

    until: float | None
    seconds: float
    wall_s: float = 0.0
    _start: float = 0.0
    _moments: list[float] = field(default_factory=list)
    _trained: list[dict[str, float]] = field(default_factory=list)

    def begin(self, at: float | None = None) -> None:
        """The clock starts, or started at that time (`time.time`)."""
        self._start = time.time() if at is None else at

    def step(self, rewards: dict[str, float], at: float | None = None) -> bool:
        """All policies have made a step; True: it is over."""
        self.wall_s = (time.time() if at is None else at) - self._start
        self._moments.append(self.wall_s)
        self._trained.append(rewards)
        target = None if self.until is None else self.until + MARGIN
        return self.wall_s > self.seconds or reached(self._trained, target)

    def row(self, evaluated: Sequence[dict[str, float]], facts: Mapping[str, float]) -> dict[str, Any]:
        """Of the whole run. `evaluated`: what the weights after each step earn. `facts`: times become shares of it."""
        shares = {name[:-2]: round(s / self.wall_s, 3) for name, s in facts.items() if name in PARTS}
        others = {name: round(value, 3) for name, value in facts.items() if name not in PARTS}
        steps, trained = first_reached(evaluated, self.until), first_reached(self._trained, self.until)
        return {
            "steps": steps, "t_s": self._moments[steps - 1] if steps else None,
            "steps_trained": trained, "t_trained_s": self._moments[trained - 1] if trained else None,
            "s_per_step": self.wall_s / len(self._moments), "reward": last(evaluated), **shares, **others,
            "curve": [
                [round(t, 2), *(round(reward, 3) for row in (weights, batch) for reward in row.values())]
                for t, weights, batch in zip(self._moments, evaluated, self._trained, strict=True)
            ],
        }  # fmt: skip


PARTS = ("rollout_s", "train_s", "push_s")


def first_reached(rewards: Sequence[Mapping[str, float]], until: float | None) -> int | None:
    """After how many steps the target was reached."""
    return next((n for n in range(WINDOW, len(rewards) + 1) if reached(rewards[:n], until)), None)


def reached(rewards: Sequence[Mapping[str, float]], until: float | None) -> bool:
    """The last WINDOW steps are at the target, every policy."""
    return until is not None and len(rewards) >= WINDOW and min(last(rewards).values()) >= until


def last(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of the last WINDOW steps, by policy."""
    rows = rewards[-WINDOW:]
    return {name: round(statistics.mean(row[name] for row in rows), 3) for name in rows[-1]}
