"""The short form of `make faults`: kills and a bad network over small runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.faults.drill import (
    VICTIMS,
    Drill,
    Kill,
    drill_config,
    kills_of,
    network_drill,
    told_by_the_trainer,
)


@pytest.mark.flow
def test_kills_of_service_trainer_and_worker_lose_and_repeat_nothing(tmp_path: Path) -> None:
    config = drill_config("kills", tmp_path, 60, stage=False)
    drill = Drill(config, tmp_path / "kills", tmp_path / "cache", node_process=False)
    result = drill.run([Kill("dataflow", 15, 0.05), Kill("worker", 25, 0.0), Kill("trainer", 40, 0.02)])
    assert result.problems == [] and result.restarts == 2
    assert result.trained == 60 and result.admitted == 60 + sum(result.dropped.values())


@pytest.mark.flow
def test_a_bad_network_loses_and_repeats_nothing(tmp_path: Path) -> None:
    result = network_drill(tmp_path, tmp_path / "cache", 3, tasks=40)
    assert result.problems == [] and result.trained == 40
    assert result.faults.count(",") >= 3, "too few kinds of faults"


def test_the_plan_of_kills_is_seeded_and_meets_every_victim() -> None:
    plans = [kills_of(seed, 3, 180) for seed in range(17)]
    assert plans == [kills_of(seed, 3, 180) for seed in range(17)]
    assert {kill.victim for plan in plans for kill in plan} == set(VICTIMS)
    assert sum(map(len, plans)) >= 50


def test_a_trainer_that_got_something_twice_is_found(tmp_path: Path) -> None:
    notes = tmp_path / "trained.jsonl"
    notes.write_text(
        '{"step": 1, "episodes": ["a/0", "a/1"]}\n{"step": 1, "episodes": ["a/0"]}\n{"step": 2, "episodes": ["a/1"]}\n'
    )
    assert told_by_the_trainer(notes, 3) == [
        "batch 1 came again with other episodes", "episode a/1 came in 2 batches", "the trainer got batches [1, 2]",
    ]  # fmt: skip
