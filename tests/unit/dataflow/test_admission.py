"""The source cursor and the staleness gate."""

from __future__ import annotations

import pytest

from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.state import Machine
from astraflow.errors import SourceError
from astraflow.testing.dataflow import Desk, Rows, check_law, policy_section, small_config, sources


def test_nothing_is_leased_before_every_policy_has_version_0() -> None:
    desk = Desk(small_config(policies={"actor": policy_section(), "verifier": policy_section()}))
    desk.start()
    desk.machine.state.policies["verifier"].latest = -1
    assert desk.lease(4) == []
    desk.resume(0, policy="verifier")
    assert len(desk.lease(4)) == 4


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_gate_admits_staleness_plus_one_batches(max_staleness: int) -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, max_staleness)))
    desk.start()
    assert len(desk.lease(100)) == (max_staleness + 1) * 2 * 2
    assert desk.lease(100) == []


def test_with_staleness_0_the_next_groups_wait_for_the_acknowledgement() -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, 0)))
    desk.start()
    desk.play(4)
    assert desk.take(0) is not None
    assert desk.lease(1) == []
    desk.ack(1)
    assert len(desk.lease(100)) == 4


def test_a_dropped_group_frees_its_slot_at_once() -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, 0)))
    desk.start()
    leases = desk.lease(4)
    desk.commit(leases[:2], [1.0, 1.0])
    assert desk.machine.state.policies["actor"].dropped == {"zero_variance": 1}
    assert len(desk.lease(100)) == 2


def test_no_more_groups_are_admitted_than_the_remaining_steps_need() -> None:
    desk = Desk(small_config(run__steps=2, policies__actor=policy_section(2, 5)))
    desk.start()
    assert len(desk.play(100)) == 8
    desk.step(0)
    assert desk.lease(100) == []
    desk.step(1)
    assert desk.machine.finished
    assert desk.machine.state.admitted == desk.machine.state.trained == 4


def test_every_epoch_is_a_shuffle_of_all_rows_and_never_runs_dry() -> None:
    config = small_config(run__steps=100, policies__actor=policy_section(2, 1), workflow__group_size=2)
    desk = Desk(config, sources(5))
    desk.start()
    tasks = []
    for version in range(10):
        tasks += [lease.task for lease in desk.play(100, version)]
        desk.step(version)
    rows = [t.row for t in tasks if t.epoch == 0][::2]
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert [t.row for t in tasks if t.epoch == 1][::2] != rows or [t.row for t in tasks if t.epoch == 2][::2] != rows
    assert max(t.epoch for t in tasks) >= 3


def test_the_order_depends_on_the_seed_only() -> None:
    def order(seed: int) -> list[int]:
        desk = Desk(small_config(run__seed=seed, policies__actor=policy_section(20, 1)), sources(40))
        desk.start()
        return [lease.task.row for lease in desk.lease(80)]

    assert order(1) == order(1) != order(2)


def test_duplicate_rows_are_different_groups_of_the_declared_size() -> None:
    class Same(Rows):
        def row(self, index: int) -> dict[str, object]:
            return {"question": "always the same"}

    desk = Desk(small_config(workflow__group_size=3), {"train": Same(4), "held": Rows(1)})
    desk.start()
    leases = desk.lease(100)
    groups = [lease.group_id for lease in leases]
    assert len(set(groups)) == 4 and all(groups.count(g) == 3 for g in groups)
    assert len({lease.episode_id for lease in leases}) == 12


def test_equal_ids_in_two_files_and_in_every_epoch_are_groups_of_their_own() -> None:
    class Same(Rows):
        def row(self, index: int) -> dict[str, object]:
            return {"question": "always the same", "id": "always the same"}

    files = {name: {"type": "sums"} for name in ("one", "two")}
    config = small_config(sources=files, mix={"ratios": {"one": 1, "two": 1}}, workflow__group_size=3, run__steps=6)
    desk = Desk(config, {"one": Same(2), "two": Same(2)})
    desk.start()
    leases = []
    for version in range(6):
        leases += desk.play(100, version)
        batch = desk.step(version)
        assert [len(group.entries) for group in batch.groups] == [3, 3]
    groups = [lease.group_id for lease in leases]
    assert {lease.task.epoch for lease in leases} == {0, 1, 2} and {lease.task.source for lease in leases} == {*files}
    assert len(set(groups)) == 12 and all(groups.count(group) == 3 for group in groups)


def test_after_a_resume_at_version_500_the_gate_still_holds() -> None:
    desk = Desk(small_config(run__steps=600, policies__actor=policy_section(2, 1)))
    desk.start()
    for version in range(500):
        desk.play(100, version)
        desk.step(version)
    desk.cover(490)
    desk.keep_snapshot()
    desk.restart()
    desk.resume(490, trainer="t2")
    desk.lease(1000)
    assert desk.machine.state.policies["actor"].in_flight == 4
    check_law(desk.machine)


def test_an_empty_source_is_refused_by_name() -> None:
    with pytest.raises(SourceError, match=r"sources\.train=0 rows"):
        Machine(small_config(), sources(0))


def test_min_versions_follow_the_newest_version() -> None:
    desk = Desk(small_config())
    desk.start()
    assert desk.play(8)[0].min_versions == {"actor": 0}
    for version in range(2):
        desk.step(version)
        desk.play(100, version + 1)
    desk.step(2)
    assert desk.lease(1)[0].min_versions == {"actor": 2}


def test_a_lease_carries_the_sampling_of_the_policy() -> None:
    section = policy_section(sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 11})
    desk = Desk(small_config(policies__actor=section))
    desk.start()
    sampling = desk.lease(1)[0].sampling["actor"]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.7, 0.9, 5, 11)


def test_a_multi_policy_gate_is_that_of_the_tightest_policy() -> None:
    policies = {"actor": policy_section(2, 1), "verifier": policy_section(1, 1)}
    desk = Desk(small_config(policies=policies))
    desk.start()
    assert len(desk.lease(100)) == 4


def test_a_policy_that_made_its_steps_no_longer_holds_the_gate() -> None:
    policies = {"actor": policy_section(1, 1), "verifier": policy_section(1, 1)}
    desk = Desk(small_config(run__steps=1, policies=policies))
    desk.start()
    desk.play(2)
    desk.step(0, policy="verifier")
    leases = desk.lease(100)
    assert leases == []  # the actor needs one group and one waits
    desk.step(0, policy="actor")
    assert desk.machine.finished
    check_law(desk.machine)


def test_when_one_policy_is_done_the_other_goes_on_and_the_first_drops_what_it_no_longer_needs() -> None:
    policies = {"actor": policy_section(1, 3), "verifier": policy_section(1, 3)}
    desk = Desk(small_config(run__steps=2, policies=policies))
    desk.start()
    for version in range(2):
        desk.play(2, version)
        desk.step(version, policy="verifier")
    leases = desk.lease(2)
    assert leases == []
    first, second = desk.take(0), None
    desk.ack(1)
    second = desk.take(1)
    desk.ack(2)
    assert first is not None and second is not None
    assert desk.machine.finished
    check_law(desk.machine)


def test_what_is_still_played_when_the_run_ends_is_dropped_as_finished_and_cancelled() -> None:
    policies = {"actor": policy_section(1, 3), "verifier": policy_section(1, 3)}
    desk = Desk(small_config(run__steps=1, policies=policies))
    desk.start()
    leases = desk.lease(100)
    assert len(leases) == 2
    state = desk.machine.state
    for policy in state.policies.values():  # as if both had got their groups elsewhere
        policy.admitted += 1
    desk.machine.state.policies["actor"].trained += 1
    desk.machine.state.policies["verifier"].trained += 1
    for policy in state.policies.values():
        policy.latest = 1
    desk.do(c.Reopen())
    desk.machine.leases.abandon_training()
    assert state.policies["actor"].dropped == {"finished": 1}
    assert state.groups == {} and state.nodes["n"].held == {}
    cancelled = [i.episode_id for i in desk.machine.context.out if isinstance(i, c.Cancel)]
    assert cancelled == [lease.episode_id for lease in leases]
