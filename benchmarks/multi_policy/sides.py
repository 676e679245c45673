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


def words(start: Path, seed: int) -> list[str]:
    """Overrides of the run file: start weights and seed."""
    own = [f"--policies.{name}.{rest}" for name in POLICIES for rest in (f"model={start / name}", "warm_start=none")]
    return [f"--run.seed={seed}", *own]


def run_config(start: Path, seed: int, more: Sequence[str] = ()) -> RunConfig:
    """The run file as a side plays it."""
    return load_run(RUN_FILE, [*words(start, seed), *more])


def warm_start(folder: Path, seed: int) -> Path:
    """A model directory for each policy after its warm start, in `folder`."""
    for name in POLICIES:
        command = astraflow_command("sft", str(RUN_FILE), "--policy", name, "--out", str(folder / name))
        command += [f"--run.seed={seed}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=child_environment(None))
        if done.returncode:
            raise SystemExit(f"the warm start of {name} failed:\n{done.stderr[-3000:]}")
    return folder


@dataclass
class Curve:
    """Rewards of every policy by step. `until`: the target of each; None: only time ends it."""

    until: float | None
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    _start: float = 0.0
    _rows: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def begin(self) -> None:
        """The clock starts."""
        self._start = time.perf_counter()

    def step(self, rewards: dict[str, float]) -> bool:
        """All policies have made a step; True: it is over."""
        self.wall_s = time.perf_counter() - self._start
        self._rows.append((self.wall_s, rewards))
        return self.wall_s > self.seconds or reached([r for _, r in self._rows], self.until)

    def finish(self, **facts: float) -> None:
        """`facts` of the whole run, times as shares of it."""
        rewards = [r for _, r in self._rows]
        shares = {name[:-2]: round(s / self.wall_s, 3) for name, s in facts.items() if name in PARTS}
        others = {name: round(value, 3) for name, value in facts.items() if name not in PARTS}
        self.facts = {
            "steps": len(rewards), "t_s": self.wall_s if reached(rewards, self.until) else None,
            "s_per_step": self.wall_s / len(rewards), "reward": last(rewards), **shares, **others,
        }  # fmt: skip
        self.facts["curve"] = [[round(t, 2), *(round(r, 3) for r in row.values())] for t, row in self._rows]


PARTS = ("rollout_s", "train_s", "push_s")


def reached(rewards: Sequence[Mapping[str, float]], until: float | None) -> bool:
    """The last WINDOW steps are at the target, every policy."""
    return until is not None and len(rewards) >= WINDOW and min(last(rewards).values()) >= until


def last(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of the last WINDOW steps, by policy."""
    rows = rewards[-WINDOW:]
    return {name: round(statistics.mean(row[name] for row in rows), 3) for name in rows[-1]}
