"""Trained groups that are trained again: the operator, what the machine keeps, the law, the gate, recovery."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from astraflow.config.rooms import CORRECTS_OFF_POLICY, ROOMS, resolve
from astraflow.config.schema import RunConfig
from astraflow.contracts import Operator
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Batch
from astraflow.dataflow.operators.replay import Replay
from astraflow.dataflow.views.status import prometheus_text, status
from astraflow.errors import DataflowError
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config, sources
from astraflow.types import Group, Stored


def stored(number: int, source: str = "train", *, uses: int = 1, version: int = 0, size: float = 1.0) -> Any:
    return Stored(f"{source}/0/{number}", source, 1, uses, version, size, 0.5)


def numbers(group_ids: Sequence[str]) -> list[int]:
    return [int(i.rpartition("/")[2]) for i in group_ids]


def config(
    groups: int = 4, max_staleness: int = 1, more: Sequence[Any] = (), steps: int = 20, **options: Any
) -> RunConfig:
    """Replays half of each batch, up to 4 versions behind, with a loss that corrects that."""
    replay = {"type": "replay", "ratio": 0.5, "max_age": 4} | options
    section = policy_section(groups, max_staleness, operators=["zero_variance", replay, *more])
    return small_config(run__steps=steps, policies={"actor": section | {"algorithm": {"loss": "m2po"}}})


def started(run: RunConfig) -> Desk:
    desk = Desk(run, sources(1000))
    desk.start()
    return desk


def play(desk: Desk, version: int) -> None:
    """All that the gate lets through."""
    while leases := desk.lease(2):
        desk.commit(leases, [0.0, 1.0], version=version)


def content(batch: Batch | None) -> list[tuple[str, float, list[float]]]:
    assert batch is not None
    return [(g.group_id, g.weight, [e.advantage for e in g.entries]) for g in batch.groups]


def test_the_share_is_exact_over_steps() -> None:
    replay = Replay(ratio=0.3, max_uses=100)
    many = [stored(i) for i in range(50)]
    counts = [len(replay.select(many, 4, step)) for step in range(1, 11)]
    assert sum(counts) == 12 and set(counts) == {1, 2}
    assert len(Replay(ratio=0.99).select(many, 1, 1)) == 0, "fewer than the batch has"


def test_latest_takes_the_newest_version_then_the_least_used() -> None:
    replay = Replay(ratio=0.75, max_uses=5)
    groups = [stored(0, version=1), stored(1, version=3, uses=2), stored(2, version=3), stored(3, version=2)]
    assert numbers(replay.select(groups, 4, 1)) == [2, 1, 3]
    assert numbers(Replay(size=2, max_uses=5).retain(groups, 1)) == [2, 1]


def test_priority_takes_the_largest_advantage() -> None:
    replay = Replay(ratio=0.5, selector="priority", size=2)
    groups = [stored(0, size=0.1), stored(1, size=2.0), stored(2, size=1.0), stored(3, size=1.0, version=1)]
    assert numbers(replay.select(groups, 4, 1)) == [1, 3]
    assert numbers(replay.retain(groups, 1)) == [1, 3]


def test_stratified_takes_sources_in_turn_and_begins_with_another_each_step() -> None:
    replay = Replay(ratio=0.5, selector="stratified", size=3)
    groups = [stored(i, "a", version=9) for i in range(4)] + [stored(8, "b"), stored(9, "c")]
    assert {i.split("/")[0] for i in replay.retain(groups, 1)} == {"a", "b", "c"}
    first = [replay.select(groups, 2, step)[0].split("/")[0] for step in (1, 2, 3)]
    assert sorted(first) == ["a", "b", "c"]


def test_what_was_used_enough_or_is_too_old_takes_no_part() -> None:
    groups = [stored(0, uses=2, version=5), stored(1, version=2), stored(2, version=3)]
    replay = Replay(ratio=0.9, max_age=2)
    assert numbers(replay.select(groups, 4, 6)) == [2]
    assert numbers(replay.retain(groups, 4)) == [2, 1]


@pytest.mark.parametrize(
    ("option", "value"),
    [("ratio", 1.0), ("ratio", 0.0), ("size", 0), ("selector", "x"), ("max_age", -1), ("max_uses", 1)],
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(DataflowError, match=f"replay.{option}"):
        Replay(**{option: value})


def test_a_task_counts_once_by_its_first_training_and_every_batch_is_full() -> None:
    desk = started(config())
    policy = desk.machine.state.policies["actor"]
    shares = []
    for version in range(19):
        play(desk, version)
        batch = desk.step(version)
        assert len(batch.groups) == 4 and batch.metrics["staleness/max"] <= 4
        shares.append(batch.num_replayed)
        assert batch.metrics["batch/replayed_groups"] == batch.num_replayed
        check_law(desk.machine)
    assert policy.num_replayed == sum(shares) and shares[-6:] == [2] * 6, shares
    assert policy.trained == 76 - policy.num_replayed == desk.machine.state.trained
    assert sum(policy.dropped.values()) == 0, "the gate admits as many as are needed"
    shown = status(desk.machine, 0.0)["policies"]["actor"]["replay"]
    assert shown["replayed"] == policy.num_replayed and shown["stored"] == len(policy.stored)
    text = prometheus_text(desk.machine, {}).decode()
    assert f'astraflow_groups_replayed_total{{policy="actor"}} {policy.num_replayed}' in text


def busy(desk: Desk, steps: int, keep: int = 0) -> list[int]:
    """Groups trained again in each step; nodes play all that the gate lets through, `keep` episodes of it later."""
    playing, again = list[Any](), list[int]()

    def commit() -> None:
        lease, version = playing.pop(0)
        desk.commit([lease], [float(lease.episode_id[-1] == "0")], version=version)

    for version in range(steps):
        while leases := desk.lease(64):
            playing += [(lease, version) for lease in leases]
        while len(playing) > keep:
            commit()
        while (batch := desk.take(version)) is None:
            commit()
        desk.ack(batch.step)
        again.append(batch.num_replayed)
        if version % 10 == 5:
            check_law(desk.machine)
            desk.restart()
    return again


@pytest.mark.parametrize(("max_staleness", "keep"), [(0, 0), (1, 0), (1, 12), (2, 0), (3, 12)])
def test_the_share_holds_although_selected_groups_give_way_to_fresh_ones(max_staleness: int, keep: int) -> None:
    desk = started(config(16, max_staleness, steps=30, ratio=0.3, max_age=8))
    again = busy(desk, 30, keep)
    asked = int(30 * 0.3 * 16) - int(0.3 * 16)  # nothing is stored before the first step
    assert asked - 4 <= sum(again) <= asked, "at most one step behind"
    assert desk.machine.state.policies["actor"].owed == asked - sum(again)


def test_what_is_owed_is_made_up_for_bit_by_bit() -> None:
    again = busy(started(config(16, 3, ratio=0.5, max_age=8)), 20)
    assert 8 < max(again) <= 12, "else a batch would be made of old groups only"


def test_what_is_not_there_is_not_owed() -> None:
    """Nothing is made up for what there was not enough of to be selected."""
    desk = started(config(ratio=0.9, max_staleness=0, max_uses=2))
    for version in range(12):
        play(desk, version)
        desk.step(version)
        policy = desk.machine.state.policies["actor"]
        assert policy.owed == len(policy.selected) <= 3


def test_no_more_is_owed_than_a_batch_holds() -> None:
    """However long groups had to give way: a debt of many steps would make batches of old groups for as long."""
    desk = started(config(max_staleness=0))
    policy = desk.machine.state.policies["actor"]
    play(desk, 0)
    policy.owed = 1000
    desk.step(0)
    assert len(policy.selected) < 4 < policy.owed <= 4 + len(policy.selected)


def test_groups_that_replay_a_damaged_batch_are_owed() -> None:
    desk = started(config(max_staleness=0))
    for version in (0, 1):
        play(desk, version)
        desk.step(version)
    policy = desk.machine.state.policies["actor"]
    play(desk, 2)
    batch = desk.take(2)
    assert batch is not None and batch.num_replayed == 2 and policy.owed == 0
    fresh = {e.part.put for g in batch.groups[2:] for e in g.entries}
    desk.do(c.DropDamaged(sorted(fresh), "a segment"))
    assert desk.take(2) is None and policy.owed == 2
    check_law(desk.machine, damaged=True)


def test_fewer_tasks_are_rolled_out() -> None:
    admitted = []
    for ratio in (0.01, 0.5):
        desk = started(config(ratio=ratio))
        for version in range(20):
            play(desk, version)
            desk.step(version)
        admitted.append(desk.machine.state.admitted)
        assert desk.machine.state.dropped.keys() <= {"finished"}
    assert admitted[0] == 80 and admitted[1] < 56


def test_without_correction_no_replayed_group_is_beyond_the_bound() -> None:
    desk = started(config(max_staleness=3, max_age=None, ratio=0.5))
    for version in range(12):
        play(desk, version)
        assert desk.step(version).metrics["staleness/max"] <= 3
        check_law(desk.machine)
    assert desk.machine.state.policies["actor"].num_replayed


def test_a_synchronous_run_with_correction_replays_and_needs_fewer_fresh_groups() -> None:
    desk = started(config(max_staleness=0))
    again = []
    for version in range(6):
        play(desk, version)
        again.append(desk.step(version).num_replayed)
        check_law(desk.machine)
    assert again == [0, 2, 2, 2, 2, 2]
    assert desk.machine.state.policies["actor"].dropped == {}


def test_a_synchronous_run_without_correction_replays_nothing_and_goes_on() -> None:
    desk = started(config(max_staleness=0, max_age=None))
    for version in range(4):
        play(desk, version)
        assert desk.step(version).num_replayed == 0


def test_a_batch_with_replayed_groups_is_served_again_identically() -> None:
    desk = started(config())
    served = []
    for version in range(6):
        play(desk, version)
        served.append(content(desk.step(version)))
        if version == 3:
            desk.keep_snapshot()
    assert any(b.num_replayed for b in desk.machine.state.policies["actor"].batches.values())
    before = json.loads(desk.machine.snapshot())
    desk.restart()
    assert json.loads(desk.machine.snapshot()) == before
    desk.resume(0, trainer="t2")
    assert [content(desk.take(v, trainer="t2")) for v in range(6)] == served
    check_law(desk.machine)


def test_rows_stay_while_a_batch_or_the_store_needs_them() -> None:
    desk = started(config())
    state = desk.machine.state
    for version in range(6):
        play(desk, version)
        desk.step(version)
        desk.cover(version + 1)
        check_law(desk.machine)  # refs are those of what waits, of batches, and of the store
    assert state.policies["actor"].batches == {} and state.policies["actor"].stored


def test_at_the_end_nothing_is_stored() -> None:
    desk = started(config())
    for version in range(20):
        play(desk, version)
        desk.step(version)
    desk.cover(20)
    assert desk.machine.state.policies["actor"].stored == {} and desk.machine.state.puts == {}


def test_a_fresh_group_in_its_last_step_goes_before_a_replayed_one() -> None:
    """The first groups are admitted before anything is stored: without this rule some would grow stale."""
    desk = started(config(ratio=0.75))
    play(desk, 0)
    desk.step(0)
    assert desk.machine.state.policies["actor"].selected
    assert desk.step(1).num_replayed == 0
    assert desk.machine.state.policies["actor"].dropped == {}


def test_pieces_of_a_cut_group_are_stored_as_one_and_batches_stay_exact() -> None:
    section = policy_section(16, 3, operators=["zero_variance", {"type": "replay", "ratio": 0.5}])
    section["batch"]["episodes"] = 10
    desk = started(small_config(run__steps=12, workflow__group_size=4, policies={"actor": section}))
    policy = desk.machine.state.policies["actor"]
    again, sizes = 0, dict[str, list[int]]()
    for version in range(8):
        while leases := desk.lease(4):
            desk.commit(leases, [0.0, 1.0, 1.0, 1.0], version=version)
        batch = desk.step(version)
        assert batch.metrics["batch/episodes"] == 10
        again += batch.num_replayed
        for group_id, kept in policy.stored.items():
            sizes.setdefault(group_id, []).append(len(kept.group.entries))
        check_law(desk.machine)
    assert again
    assert any(seen[0] == 2 and seen[-1] == 4 for seen in sizes.values()), sizes


class Doubles(Operator):
    """Counts the batches that a group's weight went through."""

    phase = "weight"

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        for group in groups:
            group.weight *= 2


def test_what_operators_do_to_a_batch_does_not_pile_up_on_what_is_stored() -> None:
    desk = started(config(more=[f"{__name__}:Doubles"]))
    for version in range(8):
        play(desk, version)
        assert {g.weight for g in desk.step(version).groups} == {2.0}
    assert desk.machine.state.policies["actor"].num_replayed
    check_law(desk.machine)


class Broken(Doubles):
    """Fails at the third batch."""

    broken = True

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        if step == 3 and Broken.broken:
            raise RuntimeError("boom")


class Wild(Replay):
    """Selects what it was not given."""

    answer: Any = None

    def select(self, stored: Sequence[Stored], groups: int, step: int) -> Any:
        return Wild.answer


def test_an_operator_that_fails_on_a_batch_stops_the_run_and_loses_nothing() -> None:
    desk = started(config(more=[f"{__name__}:Broken"]))
    for version in range(2):
        play(desk, version)
        desk.step(version)
    play(desk, 2)
    before = json.loads(desk.machine.snapshot())
    assert desk.take(2) is None
    failure = desk.machine.state.failure
    assert failure is not None and "Broken" in str(failure) and "boom" in str(failure)
    after = json.loads(desk.machine.snapshot())
    for key in ("queue", "selected", "stored", "rest", "batches"):
        assert after["policies"]["actor"][key] == before["policies"]["actor"][key], key
    check_law(desk.machine)
    Broken.broken = False
    desk.restart()
    assert len(desk.step(2).groups) == 4
    check_law(desk.machine)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(["train/0/nowhere"], "is not one of the stored groups"), ([[1]], "unhashable"), (5, "not iterable")],
)
def test_an_operator_that_selects_what_is_not_stored_stops_the_run(
    answer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wild, "answer", answer)
    section = policy_section(2, 1, operators=["zero_variance", {"type": f"{__name__}:Wild", "ratio": 0.5}])
    desk = started(small_config(policies={"actor": section}))
    play(desk, 0)
    desk.step(0)
    assert said in str(desk.machine.state.failure) and "policies.actor Wild" in str(desk.machine.state.failure)
    check_law(desk.machine)


def test_the_losses_that_correct_off_policy_data_are_those_whose_class_says_so() -> None:
    pytest.importorskip("torch")
    said = {name for name in ROOMS["losses"] if resolve("losses", name, "x").corrects_off_policy}
    assert said == CORRECTS_OFF_POLICY
