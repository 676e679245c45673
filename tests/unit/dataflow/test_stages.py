"""Groups that wait for stages: who gets which entry, what comes back, and what becomes of the group."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.liveness import LONGEST_LEASE
from astraflow.dataflow.views.life import moments_of
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config

ECHO = {"type": "astraflow.testing.stages:EchoStage"}
SUM = {"type": "astraflow.testing.stages:EchoSumStage"}
REWARD = {"type": "astraflow.testing.stages:LengthReward"}
REWARD_OF_ECHO = {"type": "astraflow.testing.stages:EchoReward"}


def desk(stages: dict[str, Any], **changes: Any) -> Desk:
    found = Desk(small_config(stages=stages, **changes))
    found.start("n")
    return found


def queued(found: Desk, policy: str = "actor") -> int:
    return len(found.machine.state.policies[policy].queue)


def dropped(found: Desk) -> dict[str, int]:
    return found.machine.state.policies["actor"].dropped


def test_a_group_waits_outside_the_queue_until_every_entry_has_its_columns() -> None:
    found = desk({"echo": ECHO})
    found.play(2)
    assert queued(found) == 0 and len(found.machine.state.staged) == 1
    check_law(found.machine)
    (first,) = found.stage_lease("echo", 1)
    assert found.stage_add("echo", [first]) == {first[0]: "accepted"}
    assert queued(found) == 0
    check_law(found.machine)
    found.stage_add("echo", found.stage_lease("echo", 10))
    assert queued(found) == 1 and not found.machine.state.staged
    check_law(found.machine)
    found.play(2)
    found.stage_add("echo", found.stage_lease("echo", 10))
    batch = found.step(0)
    assert [[a.stage for a in e.added] for g in batch.groups for e in g.entries] == [["echo"]] * 4
    check_law(found.machine)
    found.cover(1)
    assert not found.machine.state.puts
    check_law(found.machine)


def test_entries_come_oldest_version_first_and_about_n_rows() -> None:
    found = desk({"echo": ECHO}, policies__actor=policy_section(1, 1))
    found.play(2)
    for step in (1, 2):
        found.stage_add("echo", found.stage_lease("echo", 2))
        found.step(step - 1)
        found.play(2, version=step)
    found.play(2, version=1)
    given = found.stage_lease("echo", 3)
    assert len(given) == 3
    first = [found.machine.state.staged[e.rpartition("/")[0]].min_version for e, _ in given]
    assert first == [1, 1, 2]


def test_a_repeated_request_gets_the_same_rows_and_changes_nothing() -> None:
    found = desk({"echo": ECHO})
    found.play(2)
    given = found.stage_lease("echo", 1, request="a")
    assert found.stage_lease("echo", 1, request="a") == given
    assert found.stage_lease("echo", 5, request="b") != given
    answer = found.stage_add("echo", given, request="p")
    assert found.stage_add("echo", given, request="p") == answer == {given[0][0]: "accepted"}
    again = found.stage_add("echo", given, request="q")
    assert "has the columns of stage echo already" in again[given[0][0]]
    assert found.machine.state.stages["echo"].refused == {"late": 1}
    check_law(found.machine)


def test_a_stage_sees_an_entry_when_the_columns_it_needs_are_there() -> None:
    found = desk({"sum": SUM, "echo": ECHO})
    found.play(2)
    assert found.stage_lease("sum", 10) == []
    first, second = found.stage_lease("echo", 10)
    found.stage_add("echo", [first])
    assert [e for e, _ in found.stage_lease("sum", 10)] == [first[0]]
    found.stage_add("echo", [second])
    assert [e for e, _ in found.stage_lease("sum", 10)] == [second[0]]
    held = found.machine.state.stages["sum"].workers["w"].held
    found.stage_add("sum", list(held.items()))
    assert queued(found) == 1
    check_law(found.machine)


def test_a_reward_stage_comes_before_the_operators() -> None:
    found = desk({"judge": REWARD}, policies__actor=policy_section(1, 1, operators=["zero_variance"]))
    leases = found.lease(2)
    found.commit(leases, [None, None])  # unscored: without the stage the group would be dropped
    found.stage_add("judge", found.stage_lease("judge", 10), lambda e: float(e[-1]))
    assert queued(found) == 1
    entries = found.step(0).groups[0].entries
    assert sorted(e.part.reward for e in entries) == [0.0, 1.0] and sorted(e.advantage for e in entries)[0] < 0
    leases = found.lease(2)
    found.commit(leases, [0.0, 1.0])  # the stage's reward takes the place of the workflow's
    found.stage_add("judge", found.stage_lease("judge", 10), lambda e: 0.5)
    assert dropped(found) == {"zero_variance": 1}
    check_law(found.machine)


def test_a_reward_that_stays_unscored_is_a_failed_group_never_zero() -> None:
    found = desk({"judge": REWARD})
    found.commit(found.lease(2), [1.0, 0.0])
    found.stage_add("judge", found.stage_lease("judge", 10), lambda e: None)
    assert dropped(found) == {"unscored": 1}
    check_law(found.machine)


def test_what_a_reward_stage_needs_comes_before_the_operators_too() -> None:
    found = desk({"judge": REWARD_OF_ECHO, "echo": ECHO, "sum": SUM})
    found.commit(found.lease(2), [None, None])
    assert found.stage_lease("judge") == [] and found.stage_lease("sum") == []
    found.stage_add("echo", found.stage_lease("echo", 10))
    assert found.stage_lease("sum") == []
    found.stage_add("judge", found.stage_lease("judge", 10), lambda e: float(e[-1]))
    found.stage_add("sum", found.stage_lease("sum", 10))
    (entries,) = (g.entries for g in found.machine.state.policies["actor"].queue.values())
    assert [[a.stage for a in e.added] for e in entries] == [["echo", "judge", "sum"]] * 2
    check_law(found.machine)
    found.commit(found.lease(2), [None, None])
    found.stage_add("echo", found.stage_lease("echo", 10))
    found.stage_add("judge", found.stage_lease("judge", 10), lambda e: 1.0)
    assert dropped(found) == {"zero_variance": 1} and not found.machine.state.staged
    check_law(found.machine)


def test_failed_episodes_and_groups_without_tokens_pass_the_stages_by() -> None:
    found = desk({"judge": REWARD, "echo": ECHO})
    found.commit(found.lease(2), [1.0, 1.0], error="env: broke")
    assert not found.machine.state.staged and dropped(found) == {"env": 1}
    first, second = found.lease(2)
    found.commit([first], [1.0])
    found.commit([second], [1.0], error="env: broke")
    assert len(found.stage_lease("judge", 10)) == 1
    check_law(found.machine)


def test_a_silent_worker_loses_its_rows_and_comes_too_late() -> None:
    found = desk({"echo": {**ECHO, "lease_s": 5.0}})
    found.play(2)
    given = found.stage_lease("echo", 10, worker="a")
    assert found.pass_time(4.0) is None
    found.stage_lease("echo", 0, worker="a")  # a sign of life
    assert found.pass_time(4.0) is None
    expired = found.pass_time(2.0)
    assert expired is not None and expired.workers == [("echo", "a")]
    check_law(found.machine)
    again = found.stage_lease("echo", 10, worker="b")
    assert [(e, a + 1) for e, a in given] == again
    late = found.stage_add("echo", given, worker="a")
    assert all("is over, attempt 2 is held by b" in x for x in late.values())
    assert set(found.stage_add("echo", again, worker="b").values()) == {"accepted"}
    assert queued(found) == 1 and found.machine.state.stages["echo"].num_lost == 2
    check_law(found.machine)


@pytest.mark.parametrize("sibling", ["9" * 5000, "00", "٠"])
def test_an_entry_is_named_as_the_service_names_it(sibling: str) -> None:
    found = desk({"echo": ECHO})
    found.play(2)
    (entry, attempt), *_ = found.stage_lease("echo", 1)
    name = f"{entry.rpartition('/')[0]}/{sibling}"
    command = c.AddColumns("echo", "w", "r", None, [c.EntryColumns(name, attempt, [0])])
    applied = found.machine.apply(command, found.now)
    assert applied.reply == {name: f"refused: entry {name} does not wait for stages any more"}
    assert [m[2]["episode"] for m in moments_of(command, applied, found.machine)] == [-1]
    check_law(found.machine)


def test_a_worker_that_lives_cannot_keep_rows_for_ever() -> None:
    found = desk({"echo": {**ECHO, "lease_s": 0.5}})
    found.play(2)
    given = found.stage_lease("echo", 10)
    for _ in range(LONGEST_LEASE):
        assert not found.machine.live.due(found.now)
        found.now += 0.5
        found.stage_lease("echo", 0)
    expired = found.pass_time(0.0)
    assert expired is not None and sorted(expired.rows) == sorted(("echo", e, 1) for e, _ in given)
    assert found.pass_time(0.0) is None
    check_law(found.machine)


def test_attempts_are_counted_and_the_group_is_dropped_by_name() -> None:
    found = desk({"echo": {**ECHO, "max_attempts": 2}, "sum": SUM})
    found.play(4)
    one, *rest = found.stage_lease("echo", 10)
    found.stage_add("echo", rest[:1])
    assert "not a number" in found.stage_add("echo", [one], problem="not_finite: not a number")[one[0]]
    check_law(found.machine)
    (again,) = found.stage_lease("echo", 1)
    assert again == (one[0], 2)
    found.stage_add("echo", [again], problem="not_finite: not a number")
    assert dropped(found) == {"stage_echo": 1} and len(found.machine.state.staged) == 1
    assert found.machine.state.stages["echo"].refused == {"not_finite": 2}
    check_law(found.machine)
    answer = found.stage_add("echo", [again])
    assert "does not wait for stages any more" in answer[again[0]]
    found.stage_add("echo", rest[1:])
    found.stage_add("sum", found.stage_lease("sum", 10))
    assert queued(found) == 1
    check_law(found.machine)


def test_a_worker_that_leaves_gives_its_rows_back_uncounted() -> None:
    found = desk({"echo": {**ECHO, "max_attempts": 1}})
    found.play(2)
    given = found.stage_lease("echo", 10)
    found.do(c.LeaveStage("echo", "w"))
    assert found.stage_lease("echo", 10, worker="x") == [(e, a + 1) for e, a in given]
    assert found.machine.state.stages["echo"].num_lost == 0
    check_law(found.machine)


def test_staged_groups_that_got_too_old_are_dropped_with_the_step() -> None:
    found = desk({"echo": ECHO}, policies__actor=policy_section(1, 1))
    found.play(2)
    old = found.stage_lease("echo", 2, worker="slow")
    for version in range(2):
        found.play(2, version=version)
        found.stage_add("echo", found.stage_lease("echo", 2))
        found.step(version)
        check_law(found.machine)
    assert dropped(found) == {"stale": 1}
    assert "does not wait" in found.stage_add("echo", old, worker="slow")[old[0][0]]
    check_law(found.machine)


def test_the_last_step_of_a_policy_drops_what_waits_for_stages() -> None:
    found = desk({"echo": ECHO}, run__steps=1, policies__actor=policy_section(1, 3))
    leases = found.lease(2)
    found.commit(leases, [0.0, 1.0])
    given = found.stage_lease("echo", 1)
    found.stage_add("echo", given)
    found.stage_add("echo", found.stage_lease("echo", 10))
    found.step(0)
    assert not found.machine.state.staged and found.machine.finished
    check_law(found.machine)


def test_a_stage_of_one_policy_leaves_the_other_alone() -> None:
    policies = {"actor": policy_section(1, 1), "verifier": policy_section(1, 1)}
    found = desk({"judge": {**REWARD, "policies": ["verifier"]}}, policies=policies)
    found.play(2)
    assert queued(found) == 1 and queued(found, "verifier") == 0
    found.stage_add("judge", found.stage_lease("judge", 10), lambda e: float(e[-1]))
    assert queued(found, "verifier") == 1
    assert found.step(0).groups[0].entries[0].added == []
    check_law(found.machine)


def test_a_restart_finds_everything_as_it_was() -> None:
    found = desk({"echo": ECHO, "judge": REWARD, "sum": SUM})
    found.play(6)
    found.stage_add("judge", found.stage_lease("judge", 3), lambda e: float(e[-1]))
    found.keep_snapshot()
    found.stage_add("judge", found.stage_lease("judge", 3), lambda e: float(e[-1]))
    given = found.stage_lease("echo", 2)
    before = found.machine.snapshot()
    found.restart()
    assert found.machine.snapshot() == before
    check_law(found.machine)
    assert set(found.stage_add("echo", given).values()) == {"accepted"}
    found.pass_time(100.0)
    check_law(found.machine)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(c.Refusal, match="stage=ech is not a stage of this run; known: echo"):
        desk({"echo": ECHO}).stage_lease("ech")
