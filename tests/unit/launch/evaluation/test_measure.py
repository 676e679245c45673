"""From rows to numbers and to a table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from astraflow.estimates import wilson
from astraflow.launch.evaluation.journal import EpisodeRow
from astraflow.launch.evaluation.measure import ALL, results_of
from astraflow.launch.evaluation.table import lines_of


def played(side: str, source: str, row: int, *successes: float | None) -> list[EpisodeRow]:
    return [
        EpisodeRow(
            side=side, source=source, row=row, sample=sample, success=success, reward=success, num_tokens=10, code="c",
            error=None if success is not None else "timeout: slow",
        )
        for sample, success in enumerate(successes)
    ]  # fmt: skip


A = [*played("a", "held", 0, 1, 1), *played("a", "held", 1, 0, None), *played("a", "held", 2, None, None)]
B = [*played("b", "held", 0, 1, 0), *played("b", "held", 1, 1, 1), *played("b", "held", 2, 1, 1)]


def test_what_was_not_scored_is_counted_and_never_zero() -> None:
    (score,) = results_of({"a": A}, 2).scores
    assert (score.num_tasks, score.num_episodes, score.num_unscored) == (3, 6, 3)
    assert (score.avg.mean, score.avg.num_tasks) == (0.5, 2)
    assert (score.passes[1].mean, score.passes[1].num_tasks) == (0.5, 2)
    assert (score.passes[2].mean, score.passes[2].num_tasks) == (1.0, 1)
    assert score.errors == {"timeout": 3} and score.codes == ["c"] and score.tokens == 10
    assert (score.avg.low, score.avg.high) == pytest.approx(wilson(0.5, 2))
    assert score.reward == 0.5 and score.reward_se == pytest.approx(0.5)


def test_nothing_scored_is_no_number() -> None:
    results = results_of({"a": played("a", "held", 0, None, None), "b": B[:2]}, 2)
    assert results.scores[0].avg.mean is None and results.scores[0].reward is None
    assert results.comparisons[0].difference is None
    said = "\n".join(lines_of(results, 2))
    assert "no task in common" in said and "failed timeout 2" in said and "0.000" not in said.splitlines()[1]


def test_sides_are_compared_on_tasks_that_both_scored() -> None:
    (found,) = results_of({"a": A, "b": B}, 2).comparisons
    assert (found.first, found.second, found.num_tasks) == ("a", "b", 2)
    assert found.difference == pytest.approx((0.5 - 1 + 1 - 0) / 2)
    assert (found.better, found.worse) == (1, 1)
    assert found.low is not None and found.high is not None and found.low < found.difference < found.high


def test_each_source_and_all_of_them() -> None:
    rows = [*played("a", "x", 0, 1), *played("a", "x", 1, 0), *played("a", "y", 0, 1)]
    results = results_of({"a": rows}, 1)
    assert [(s.source, s.num_tasks, s.avg.mean) for s in results.scores] == [
        ("x", 2, 0.5), ("y", 1, 1.0), (ALL, 3, pytest.approx(2 / 3))
    ]  # fmt: skip


def test_tasks_are_told_one_by_one() -> None:
    tasks = {(t.side, t.row): t for t in results_of({"a": A, "b": B}, 2).tasks}
    assert (tasks["a", 1].scored, tasks["a", 1].unscored, tasks["a", 1].passed) == (1, 1, 0)
    assert tasks["a", 2].success is None and tasks["b", 0].success == 0.5


def test_the_table() -> None:
    lines = lines_of(results_of({"a": A, "b": B}, 2), 2)
    assert lines[0].split() == ["source", "model", "tasks", "avg@2", "pass@1", "pass@2", "reward", "unscored"]
    assert lines[1].startswith("held    a      3      0.500 [0.095, 0.905]") and lines[1].endswith("3 of 6")
    assert lines[3].startswith("held: b less a: +0.250 [") and "on 2 tasks, better on 1, worse on 1" in lines[3]
    assert lines[4] == "held, a: failed timeout 3"
    mixed = [row if row.row else replace(row, code="d") for row in A]
    assert any("2 versions of the workflow's code" in line for line in lines_of(results_of({"a": mixed}, 2), 2))
