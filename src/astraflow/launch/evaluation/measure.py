"""Rows of episodes become numbers: per side and source, per task, and side beside side on the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from astraflow.estimates import TaskMeans, ks_of, paired_difference, pass_at_k
from astraflow.launch.evaluation.journal import EpisodeRow
from astraflow.types import error_kind

PASS = 0.5
"""A success of at least so much has passed."""

ALL = "(all)"
"""All sources together."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over tasks, each of the same weight, with its interval at 95 %. None: no task says anything."""

    mean: float | None
    low: float | None
    high: float | None
    num_tasks: int  # that say something: for pass@k those of at least k scored episodes


class TaskScore(msgspec.Struct, frozen=True, kw_only=True):
    """One task, as one side played it."""

    side: str
    source: str
    row: int
    scored: int  # episodes
    unscored: int
    passed: int
    success: float | None  # mean over scored episodes; None: there is none
    reward: float | None
    errors: dict[str, int] = {}  # kind -> episodes


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One side on one source. Unscored episodes are counted, and take part in no mean."""

    side: str
    source: str  # `ALL`: of every one
    num_tasks: int
    num_episodes: int
    num_unscored: int
    avg: Estimate  # avg@k: success
    passes: dict[int, Estimate]  # k -> pass@k
    reward: float | None
    reward_se: float | None  # standard error over tasks; None: of fewer than two
    tokens: float | None  # sampled, mean of an episode
    errors: dict[str, int]
    codes: list[str]  # versions of the workflow's code that played


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """avg@k of the second side less that of the first, on the tasks that both have scored."""

    first: str
    second: str
    source: str
    num_tasks: int
    difference: float | None
    low: float | None
    high: float | None
    better: int  # tasks
    worse: int


class Results(msgspec.Struct, frozen=True):
    """What `results.json` holds beside the settings."""

    scores: list[Score]
    comparisons: list[Comparison]
    tasks: list[TaskScore]


def results_of(rows: Mapping[str, Sequence[EpisodeRow]], samples: int) -> Results:
    """`rows`: side -> its episodes; the first side is what the others are compared with."""
    tasks = {side: _tasks_of(side, episodes) for side, episodes in rows.items()}
    scores, comparisons = [], []
    for side, episodes in rows.items():
        for source in _sources_of(episodes):
            scores.append(_score(side, source, episodes, tasks[side], samples))
    first, *others = rows
    for second in others:
        for source in _sources_of(rows[second]):
            comparisons.append(_compare(source, tasks[first], tasks[second], first, second))
    return Results(scores, comparisons, [task for of_side in tasks.values() for task in of_side])


def _sources_of(episodes: Iterable[EpisodeRow]) -> list[str]:
    names = list(dict.fromkeys(episode.source for episode in episodes))
    return [*names, ALL] if len(names) > 1 else names


def _tasks_of(side: str, episodes: Sequence[EpisodeRow]) -> list[TaskScore]:
    groups: dict[tuple[str, int], list[EpisodeRow]] = {}
    for episode in episodes:
        groups.setdefault((episode.source, episode.row), []).append(episode)
    made = []
    for (source, row), group in groups.items():
        successes = [e.success for e in group if e.success is not None]
        made.append(
            TaskScore(
                side=side,
                source=source,
                row=row,
                scored=len(successes),
                unscored=len(group) - len(successes),
                passed=sum(success >= PASS for success in successes),
                success=_mean(successes),
                reward=_mean([e.reward for e in group if e.reward is not None]),
                errors=_errors(group),
            )
        )
    return made


def _score(
    side: str, source: str, episodes: Sequence[EpisodeRow], tasks: Sequence[TaskScore], samples: int
) -> Score:  # fmt: skip
    episodes = [e for e in episodes if source in (e.source, ALL)]
    tasks = [t for t in tasks if source in (t.source, ALL)]
    avg, passes = TaskMeans(), {k: TaskMeans() for k in ks_of(samples)}
    for task in tasks:
        if task.success is not None:
            avg.add(task.success, task.scored)
        for k, of_k in passes.items():
            if task.scored >= k:
                of_k.add(pass_at_k(task.scored, task.passed, k), task.scored)
    rewards = [task.reward for task in tasks if task.reward is not None]
    return Score(
        side=side, source=source, num_tasks=len(tasks), num_episodes=len(episodes),
        num_unscored=sum(e.success is None for e in episodes), avg=_estimate(avg),
        passes={k: _estimate(of_k) for k, of_k in passes.items()}, reward=_mean(rewards),
        reward_se=_standard_error(rewards), tokens=_mean([float(e.num_tokens) for e in episodes]),
        errors=_errors(episodes), codes=sorted({e.code for e in episodes if e.code}),
    )  # fmt: skip


def _compare(
    source: str, first: Sequence[TaskScore], second: Sequence[TaskScore], name: str, other: str
) -> Comparison:  # fmt: skip
    one = {(t.source, t.row): t for t in first if source in (t.source, ALL)}
    pairs = [
        ((before.success, before.scored), (after.success, after.scored))
        for after in second
        if (before := one.get((after.source, after.row))) is not None
        and before.success is not None
        and after.success is not None
    ]
    found = paired_difference([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None
    return Comparison(
        first=name, second=other, source=source, num_tasks=len(pairs),
        difference=found.mean if found else None, low=found.low if found else None, high=found.high if found else None,
        better=sum(b[0] > a[0] for a, b in pairs), worse=sum(b[0] < a[0] for a, b in pairs),
    )  # fmt: skip


def _estimate(means: TaskMeans) -> Estimate:
    low, high = means.interval or (None, None)
    return Estimate(means.mean, low, high, means.num_tasks)


def _errors(episodes: Iterable[EpisodeRow]) -> dict[str, int]:
    return dict(Counter(error_kind(e.error) for e in episodes if e.error is not None))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
