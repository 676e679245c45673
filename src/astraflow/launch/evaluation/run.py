"""One evaluation: every side plays what is not in the journal yet, then the numbers are written.

tasks of the sources ─► leases ─► play (engines of a side) ─► journal ─► results.json, table
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from astraflow.config.schema import RunConfig
from astraflow.errors import LaunchError
from astraflow.launch.evaluation.journal import EpisodeRow, Journal, open_journal
from astraflow.launch.evaluation.measure import Results, results_of
from astraflow.launch.play import PlayOptions, leases_of, play_leases, tasks_of
from astraflow.observe.jsonl import write_whole
from astraflow.types import Episode, Task

_BLOCK = 1 << 16
_BLOCKS = 64


@dataclass(frozen=True)
class Side:
    """A model, or a model for each policy, that is measured."""

    name: str
    config: RunConfig
    models: Mapping[str, str]  # policy -> directory, or its name at a service


@dataclass(frozen=True)
class Evaluation:
    """What is to be played."""

    config: RunConfig  # with the workflow, the sources and the sampling of all sides
    sides: Sequence[Side]  # the first is what the others are compared with
    sources: Sequence[str]
    num_tasks: int  # first ones of each source; 0: all
    options: PlayOptions

    @cached_property
    def tasks(self) -> list[Task]:
        """Raises: SourceError: no such source, malformed rows."""
        return [task for source in self.sources for task in tasks_of(self.config, source, self.num_tasks)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides what is played and how it is scored, beside the models."""
        sources = {}
        for source in self.sources:
            rows = [task.fields for task in self.tasks if task.source == source]
            digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode(rows, order="deterministic"))
            sources[source] = {"tasks": len(rows), "rows": digest}
        return {
            "samples": self.options.samples,
            "temperature": self.options.temperature,
            "run.seed": self.config.run.seed,
            "sources": sources,
            "workflow": self.config.workflow.model_dump(mode="json"),
            "policies": {
                name: {"sampling": section.sampling.model_dump(mode="json", exclude={"temperature"})}
                for name, section in self.config.policies.items()
            },
        }

    @cached_property
    def models(self) -> dict[str, dict[str, Any]]:
        """Side -> what it is."""
        return {side.name: _facts_of(side) for side in self.sides}

    @property
    def default_path(self) -> Path:
        """`evals/<run>-<mark>`: the same evaluation of the same models has the same one."""
        mark = xxhash.xxh3_64_hexdigest(json.dumps([self.settings, self.models]).encode())[:8]
        return Path("evals") / f"{self.config.run.name}-{mark}"


def evaluate(evaluation: Evaluation, path: Path) -> Results:
    """Play what was not played yet, and write `results.json`.

    Raises: LaunchError, ConfigError: see `open_journal`; two sides of one name, or of other policies. SourceError,
    ModelError, EngineError: what could not be played.
    """
    _check_sides(evaluation)
    with open_journal(path, evaluation.settings, evaluation.models) as journal:
        for side in evaluation.sides:
            _play_side(evaluation, side, journal)
        rows = {side.name: journal.rows(side.name) for side in evaluation.sides}
        results = results_of(rows, evaluation.options.samples)
        document = {
            "settings": evaluation.settings,
            "sides": evaluation.models,
            **msgspec.to_builtins(results, str_keys=True),
        }
        write_whole(path / "results.json", json.dumps(document, indent=2) + "\n")
    return results


def _check_sides(evaluation: Evaluation) -> None:
    names, known = [side.name for side in evaluation.sides], sorted(evaluation.config.policies)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise LaunchError("--model", twice, "is named twice", "compare different models")
    for side in evaluation.sides:
        if sorted(side.config.policies) != known:
            raise LaunchError(
                "--model", side.name, f"has other policies than {', '.join(known)}",
                "compare models of the same run file",
            )  # fmt: skip


def _facts_of(side: Side) -> dict[str, Any]:
    return {
        name: {
            "model": side.models[name],
            "weights": "" if section.remote else fingerprint(Path(side.models[name])),
            "engine": section.engine.model_dump(mode="json"),
        }
        for name, section in side.config.policies.items()
    }


def fingerprint(directory: Path) -> str:
    """Of the files of a model: sizes, and parts of what is in them; training changes every part of the weights."""
    mark = xxhash.xxh3_64()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        size = path.stat().st_size
        mark.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(place)
                mark.update(file.read(_BLOCK))
    return mark.hexdigest()


def _play_side(evaluation: Evaluation, side: Side, journal: Journal) -> None:
    def key(episode_id: str, task: Task) -> tuple[str, str, int, int]:
        return side.name, task.source, task.row, int(episode_id.rpartition("/")[2])

    leases = leases_of(evaluation.config, evaluation.tasks, evaluation.options)
    wanted = [lease for lease in leases if key(lease.episode_id, lease.task) not in journal]
    if not wanted:
        return
    trained = set(evaluation.config.trained)

    def keep(episode: Episode) -> None:
        *_, sample = key(episode.episode_id, episode.task)
        journal.add(row_of(episode, side.name, sample, trained))

    play_leases(side.config, side.models, wanted, evaluation.options, keep)
    if lost := sum(key(lease.episode_id, lease.task) not in journal for lease in wanted):
        raise LaunchError("episodes", lost, f"of {side.name} have not ended", "the same command goes on")


def row_of(episode: Episode, side: str, sample: int, trained: set[str]) -> EpisodeRow:
    """As an evaluation round of a run counts it: what trained policies earned, in the mean."""
    roots = [t for t in episode.trajectories if t.policy in trained and t.parent_branch < 0]
    rewards = [t.reward for t in roots if t.reward is not None and math.isfinite(t.reward) and episode.error is None]
    reward = sum(rewards) / len(rewards) if rewards else None
    metrics = {name: value for name, value in episode.metrics.items() if math.isfinite(value)}
    return EpisodeRow(
        side=side, source=episode.task.source, row=episode.task.row, sample=sample, reward=reward,
        success=None if reward is None else metrics.get("success", float(reward >= 1.0)),
        error=episode.error, metrics=metrics, wall_s=round(episode.wall_s, 3), code=episode.code,
        num_tokens=sum(int(t.loss_mask.sum()) for t in episode.trajectories if t.policy in trained),
    )  # fmt: skip
