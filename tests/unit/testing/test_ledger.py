"""The outside auditor of a run finds what it is for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.config.load import check_run
from astraflow.dataflow.machine import commands
from astraflow.dataflow.machine.records import Batch, Entry, Part, PolicyState, QueuedGroup, State
from astraflow.dataflow.shell import Shell
from astraflow.testing.ledger import Ledger
from astraflow.wire.messages import Join


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


def test_it_follows_a_journal_over_a_restart_of_its_service(tmp_path: Path) -> None:
    config = check_run(
        {
            "run": {"name": "a", "steps": 3},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn", "reward": "exact", "group_size": 2},
            "policies": {"actor": {"model": "tiny-char", "batch": {"groups": 1}}},
        },
        "test",
    )
    ledger = Ledger(tmp_path)
    assert ledger.look() is None
    for attempt in (1, 2):
        shell = Shell(config, tmp_path)
        joins = [commands.JoinNode(Join(node_id=f"{n}-{attempt}", name="n", capacity=1, run_id="r")) for n in "ab"]
        shell.journal.append([(shell.now(), msgspec.json.encode(join)) for join in joins])
        state = ledger.look()
        assert state is not None
        assert {f"a-{attempt}", f"b-{attempt}"} <= set(state.nodes)
        shell.crash = RuntimeError("as after kill -9: no snapshot at the end")
        shell.close()
    assert ledger.num_looks == 2
    assert ledger.problems == []
