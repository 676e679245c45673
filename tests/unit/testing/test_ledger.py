"""The outside auditor of a run finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.dataflow.machine.records import Batch, Entry, Part, PolicyState, QueuedGroup, State
from astraflow.testing.ledger import Ledger, read_state


def _group(name: str, row: int) -> QueuedGroup:
    part = Part("actor", 7, [row], [0], 0, 5, 0, 1.0)
    return QueuedGroup(name, 1.0, 0, [Entry(part, 0.5, 1.0)])


def _state(batches: dict[int, list[QueuedGroup]], *, admitted: int, trained: int) -> State:
    held = {step: Batch(step, groups, {}, acked=step <= trained) for step, groups in batches.items()}
    return State({"actor": PolicyState(batches=held, admitted=admitted, trained=trained)})


def test_a_sound_run_has_no_problems(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.examine(_state({1: [_group("a", 0)], 2: [_group("b", 1)]}, admitted=2, trained=1))
    ledger.examine(_state({2: [_group("b", 1)], 3: [_group("c", 2)]}, admitted=3, trained=2))
    assert ledger.problems == []
    assert ledger.batches == {("actor", 1): ("a",), ("actor", 2): ("b",), ("actor", 3): ("c",)}


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (_state({2: [_group("a", 1)]}, admitted=2, trained=1), "group a is in batches 1 and 2"),
        (_state({2: [_group("b", 0)]}, admitted=2, trained=1), "row 7:0 is in batches 1 and 2"),
        (_state({1: [_group("b", 1)]}, admitted=1, trained=1), "batch 1 changed"),
        (_state({}, admitted=2, trained=1), "2 admitted, but 1 trained"),
    ],
)
def test_work_that_is_repeated_changed_or_lost_is_found(tmp_path: Path, later: State, words: str) -> None:
    ledger = Ledger(tmp_path)
    ledger.examine(_state({1: [_group("a", 0)]}, admitted=1, trained=1))
    assert ledger.problems == []
    ledger.examine(later)
    assert any(words in problem for problem in ledger.problems), ledger.problems


def test_no_journal_is_no_state(tmp_path: Path) -> None:
    assert read_state(tmp_path / "journal.sqlite") is None
