"""`astraflow trainer` of one or several ranks as real processes, fed by a service with what depends on the seed alone,
and killed at given moments."""

from __future__ import annotations

import random
import sys
import threading
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.config.env import child_environment
from astraflow.config.schema import RunConfig
from astraflow.models.load import load_model, state_tensors
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.dataflow import small_config
from astraflow.testing.forked import ForkedProcess, popen
from astraflow.testing.runs import wait_until
from astraflow.testing.services import DataflowThread, PlayingNode, made_up_episode
from astraflow.training.checkpoint import load_state, named_tensors
from astraflow.types import Episode, EpisodeLease

LIMIT_S = 120.0
NOT_OF_THE_STEP = ("perf/", "weights/", "nodes/", "groups/", "queue/", "sources/", "time", "kind")  # but of the moment


def resume_config(steps: int, **policy: Any) -> RunConfig:
    """Everything that the run will train on is admitted at once: the pipeline is full whenever the trainer dies."""
    batch = {"groups": 2, "max_staleness": steps, "tokens_per_microbatch": 32}
    section = {
        "model": "tiny-char", "batch": batch, "optimizer": {"lr": 1e-3, "schedule": "cosine", "weight_decay": 0.1},
        "trainer": {"audit_trajectories": 2}, **policy,
    }  # fmt: skip
    return small_config(
        run__steps=steps, run__checkpoint_every=3, policies__actor=section,
        sources={"train": {"type": "calculator"}, "held": {"type": "sums"}}, dataflow__heartbeat_s=0.2,
    )  # fmt: skip


def play(lease: EpisodeLease, node_id: str) -> Episode:
    """As `made_up_episode`, but sampled at version 0 however far the trainer is: it must not depend on the moment."""
    episode = made_up_episode(lease, node_id)
    rows = [
        msgspec.structs.replace(row, versions=np.where(row.loss_mask, 0, -1).astype(np.int32))
        for row in episode.trajectories
    ]
    return msgspec.structs.replace(episode, trajectories=rows)


@dataclass
class Ranks:
    """The processes of one trainer."""

    url: str
    run_dir: Path
    num_ranks: int
    processes: list[ForkedProcess] = field(default_factory=list)

    def start(self) -> None:
        """All of them."""
        logs = self.run_dir / "logs"
        logs.mkdir(exist_ok=True)
        rendezvous = f"file://{self.run_dir}/rendezvous-{uuid.uuid4().hex}"
        words = ["--dataflow", self.url, "--policy", "actor", "--run-dir", str(self.run_dir), "--threads", "1"]
        for rank in range(self.num_ranks):
            which = ["--rank", str(rank), "--ranks", str(self.num_ranks), "--rendezvous", rendezvous]
            command = [sys.executable, "-m", "astraflow", "trainer", *words]
            command += which if self.num_ranks > 1 else ["--ranks", "1"]
            with (logs / f"rank{rank}.log").open("ab") as log:
                self.processes.append(popen(command, stdout=log, env=child_environment(None)))

    def kill(self, rank: int) -> list[int]:
        """`kill -9` of one of them; the exit codes of all, once all have ended."""
        self.processes[rank].kill()
        return self.wait()

    def wait(self) -> list[int]:
        """Exit codes, once all have ended by themselves."""
        codes = [process.wait(LIMIT_S) for process in self.processes]
        self.processes.clear()
        return codes

    def end(self) -> None:
        """Whatever state they are in."""
        for process in self.processes:
            process.kill()
            process.wait(60)


@dataclass(frozen=True)
class Death:
    """After `step` was trained and `delay_s` more, `rank` is killed; then `num_ranks` start."""

    step: int
    delay_s: float
    rank: int
    num_ranks: int


def deaths(steps: int, count: int, num_ranks: int, seed: int, after: int | None = None) -> list[Death]:
    """At random moments, one in each of `count` equal parts of the run. `after`: ranks from the last one on."""
    draw = random.Random(seed)
    size = steps // (count + 1)
    moments = [size * i + draw.randrange(size) for i in range(count)]
    ranks = [num_ranks] * (count - 1) + [after or num_ranks]
    return [
        Death(step, draw.uniform(0.0, 0.25), draw.randrange(num_ranks), then)
        for step, then in zip(moments, ranks, strict=True)
    ]


@dataclass(frozen=True)
class Left:
    """What a run left: steps as reported, its last checkpoint, and how each death ended."""

    rows: list[dict[str, Any]]
    checkpoint: Path
    codes: list[list[int]]
    words: str

    def facts(self) -> list[dict[str, Any]]:
        """What each step reported of the training itself."""
        return [
            {name: value for name, value in row.items() if not name.startswith(NOT_OF_THE_STEP)} for row in self.rows
        ]


def train_with(config: RunConfig, place: Path, num_ranks: int, killed: Sequence[Death] = ()) -> Left:
    """A whole run in `place`, with deaths."""
    place.mkdir(parents=True)
    codes = []
    with ExitStack() as stack:
        service = stack.enter_context(DataflowThread(config, place))
        stack.enter_context(PlayingNode(service.url, play=play))
        trainer = Ranks(service.url, place, num_ranks)
        stack.callback(trainer.end)
        trainer.start()
        for death in killed:
            wait_until(lambda death=death: _trained(place) >= death.step, f"step {death.step}", LIMIT_S)
            threading.Event().wait(death.delay_s)  # the random moment itself, nothing is waited for
            codes.append(trainer.kill(death.rank))
            trainer.num_ranks = death.num_ranks
            trainer.start()
        codes.append(trainer.wait())
    root = place / "checkpoints" / "actor"
    words = "\n".join(path.read_text(errors="replace") for path in sorted((place / "logs").glob("*.log")))
    return Left(_rows(place), root / f"step-{config.run.steps:06d}", codes, words)


def content_of(checkpoint: Path) -> dict[str, bytes]:
    """The files of the model and the tensors of the training state, by name. Which rank wrote a tensor that all of them
    have does not matter."""
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    state = load_state(checkpoint)
    found["counts"] = repr((state.version, state.step, state.skipped, state.skipped_in_a_row)).encode()
    for tensors in named_tensors(state).values():
        found |= {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
    return found


def distance(one: Path, other: Path) -> float:
    """Of the weights of two checkpoints, relative to their norm."""
    pairs = zip(*(state_tensors(load_model(path)).values() for path in (one, other)), strict=True)
    squares = [(float((a - b).square().sum()), float(a.square().sum())) for a, b in pairs]
    return (sum(d for d, _ in squares) / sum(n for _, n in squares)) ** 0.5


def _rows(place: Path) -> list[dict[str, Any]]:
    path = place / "metrics.jsonl"
    rows = [dict(row) for row in read_jsonl(path)] if path.exists() else []
    return [row for row in rows if row["kind"] == "step"]


def _trained(place: Path) -> int:
    return max((row["step"] for row in _rows(place)), default=0)
