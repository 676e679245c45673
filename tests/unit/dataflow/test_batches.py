"""Queues, batches, acknowledgement, retention, resume."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.contracts import Operator
from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Batch, Entry, Part, QueuedGroup
from astraflow.dataflow.machine.serving.forming import batch_metrics
from astraflow.dataflow.views.status import status
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config
from astraflow.types import Group


@pytest.fixture
def desk() -> Desk:
    desk = Desk(small_config())
    desk.start()
    return desk


def ids(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [g.group_id for g in batch.groups]


def test_groups_leave_in_the_order_of_their_oldest_version_then_of_arrival() -> None:
    desk = Desk(small_config(policies__actor=policy_section(3, 1)))
    desk.start()
    first = desk.lease(6)
    groups = [first[0:2], first[2:4], first[4:6]]
    for members, version in zip(groups, (1, 0, 1), strict=True):
        desk.commit(members, [0.0, 1.0], version=version)
    assert ids(desk.take(0)) == [groups[1][0].group_id, groups[0][0].group_id, groups[2][0].group_id]


def test_asking_again_gives_the_same_batch_and_less_than_a_batch_is_nothing(desk: Desk) -> None:
    desk.play(2)
    assert desk.take(0) is None
    desk.play(2)
    first = desk.take(0)
    desk.play(4)
    assert ids(desk.take(0)) == ids(first)


def test_a_group_that_became_too_old_is_dropped_as_stale_and_frees_its_slot(desk: Desk) -> None:
    slow = desk.lease(2)
    for version in range(2):
        desk.play(100, version)
        desk.step(version)
    desk.commit(slow, [0.0, 1.0], version=0)
    assert desk.machine.state.policies["actor"].dropped == {"stale": 1}
    check_law(desk.machine)


def test_a_waiting_group_that_grows_too_old_is_dropped_at_the_step_that_makes_it_so() -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, 0)))
    desk.start()
    desk.play(4)
    desk.take(0)
    entries = desk.machine.state.policies["actor"].batches[1].groups[0].entries
    accounts.admit(desk.machine.context, "train/9/9", "train")  # beyond the gate, as after a smaller max_staleness
    desk.machine.state.sources["train"].position += 1
    for e in entries:
        desk.machine.state.put_refs[e.part.put] += 1
    desk.machine.queues.push("actor", QueuedGroup("train/9/9", 1.0, 0, entries))
    desk.ack(1)
    assert desk.machine.state.policies["actor"].dropped == {"stale": 1}
    check_law(desk.machine)


def test_the_staleness_of_every_batch_is_within_the_bound(desk: Desk) -> None:
    for version in range(5):
        desk.play(100, version)
        batch = desk.step(version)
        assert batch.metrics["staleness/max"] <= 1
        counts = [batch.metrics[f"staleness/count/{i}"] for i in range(2)]
        assert sum(counts) == batch.metrics["batch/trajectories"]


def test_an_acknowledgement_frees_the_slots_and_is_idempotent(desk: Desk) -> None:
    desk.play(8)
    desk.step(0)
    before = desk.machine.snapshot()
    desk.ack(1)
    assert desk.machine.snapshot() == before
    assert desk.machine.state.policies["actor"].trained == 2


@pytest.mark.parametrize(("step", "batch"), [(1, "actor/1"), (3, "actor/3"), (0, "actor/0")])
def test_an_acknowledgement_of_a_batch_that_was_never_handed_out_is_404(desk: Desk, step: int, batch: str) -> None:
    with pytest.raises(c.Refusal) as caught:
        desk.ack(step)
    assert caught.value.status == 404


def test_a_trainer_that_did_not_resume_or_was_replaced_is_409(desk: Desk) -> None:
    desk.play(8)
    desk.take(0)
    desk.resume(0, trainer="new")
    for call in (lambda: desk.take(0), lambda: desk.ack(1), lambda: desk.cover(0)):
        with pytest.raises(c.Refusal, match="replaced by new") as caught:
            call()
        assert caught.value.status == 409
    fresh = Desk(small_config())
    with pytest.raises(c.Refusal, match="call resume first"):
        fresh.take(0)


def test_an_unknown_policy_is_404(desk: Desk) -> None:
    with pytest.raises(c.Refusal, match="known: actor") as caught:
        desk.take(0, policy="critic")
    assert caught.value.status == 404


def test_a_policy_that_made_its_steps_is_told_410() -> None:
    desk = Desk(small_config(run__steps=1))
    desk.start()
    desk.play(4)
    desk.step(0)
    with pytest.raises(c.Refusal, match=r"run\.steps") as caught:
        desk.take(1)
    assert caught.value.status == 410


def test_a_resume_serves_exactly_the_batches_after_its_version_in_order_and_counts_them_once(desk: Desk) -> None:
    served = []
    for version in range(4):
        desk.play(100, version)
        served.append(ids(desk.step(version)))
    desk.cover(1)
    reply = desk.resume(1, trainer="t2")
    assert (reply.replayed_batches, reply.latest) == (3, 4)
    trained = desk.machine.state.policies["actor"].trained
    for version in range(1, 4):
        batch = desk.take(version, trainer="t2")
        assert batch is not None and batch.acked and ids(batch) == served[version]
        desk.ack(version + 1, trainer="t2")
    assert desk.machine.state.policies["actor"].trained == trained
    assert not set(ids(desk.take(4, trainer="t2"))) & {g for batch in served for g in batch}
    check_law(desk.machine)


def test_a_batch_in_the_hands_of_a_dead_trainer_goes_to_the_next_one(desk: Desk) -> None:
    desk.play(8)
    first = ids(desk.take(0))
    desk.resume(0, trainer="t2")
    assert ids(desk.take(0, trainer="t2")) == first


def test_a_checkpoint_that_is_newer_than_the_acknowledged_step_counts_as_its_acknowledgement(desk: Desk) -> None:
    desk.play(8)
    desk.take(0)
    reply = desk.resume(1, trainer="t2")
    assert (reply.replayed_batches, reply.latest) == (0, 1)
    assert desk.machine.state.policies["actor"].trained == 2
    check_law(desk.machine)


def test_a_version_that_the_run_does_not_know_or_has_forgotten_is_refused(desk: Desk) -> None:
    with pytest.raises(c.Refusal, match="newer than the run knows"):
        desk.resume(1)
    desk.play(8)
    desk.step(0)
    desk.cover(1)
    with pytest.raises(c.Refusal, match=r"checkpoint is damaged .* check it, and resume from checkpoint 1"):
        desk.resume(0)
    with pytest.raises(c.Refusal, match="acknowledge the step"):
        desk.cover(2)


def test_bytes_are_kept_until_a_checkpoint_covers_them_and_no_longer(desk: Desk) -> None:
    desk.play(4)
    desk.step(0)
    assert desk.machine.state.puts
    desk.cover(1)
    assert desk.machine.state.puts == {} and desk.machine.state.segment_puts == {}
    assert any(isinstance(i, c.DropSegment) for i in desk.instructions)


def test_a_silent_trainer_is_reported_once_and_loses_its_batch(desk: Desk) -> None:
    desk.play(8)
    batch = desk.take(0)
    assert batch is not None and batch.holder == "t"
    desk.pass_time(61)
    assert batch.holder == ""
    events = [i for i in desk.instructions if isinstance(i, c.Event) and i.kind == "trainer_silent"]
    assert len(events) == 1
    desk.pass_time(61)
    assert len([i for i in desk.instructions if isinstance(i, c.Event) and i.kind == "trainer_silent"]) == 1
    assert status(desk.machine, desk.now)["policies"]["actor"]["trainer"]["silent_s"] == 122.0
    desk.ack(1)


def test_a_trainer_that_made_all_its_steps_is_not_reported_as_silent() -> None:
    desk = Desk(small_config(run__steps=1))
    desk.start()
    desk.play(4)
    desk.step(0)
    desk.pass_time(61)
    assert not [i for i in desk.instructions if isinstance(i, c.Event) and i.kind == "trainer_silent"]


def test_only_scored_episodes_are_rows_of_the_batch() -> None:
    desk = Desk(small_config(workflow__group_size=3, policies__actor=policy_section(1, 0)))
    desk.start()
    desk.commit(desk.lease(3), [1.0, None, 0.0])
    batch = desk.take(0)
    assert batch is not None
    assert [e.part.reward for e in batch.groups[0].entries] == [1.0, 0.0]
    assert [e.advantage for e in batch.groups[0].entries] == pytest.approx([1.0, -1.0], abs=1e-5)
    check_law(desk.machine)


def test_branches_of_an_episode_share_its_advantage_and_count_once() -> None:
    desk = Desk(small_config(policies__actor=policy_section(1, 0)))
    desk.start()
    leases = desk.lease(2)
    desk.commit(leases[:1], [0.0])
    from astraflow.dataflow.machine.records import EpisodeCommit, Put

    put = Put(9, 0, 10)
    branched = Part("actor", put.key, [0, 1, 2], [0, 0, 0], 0, 9, 1, 1.0)
    lease = leases[1]
    desk.do(c.CommitEpisodes("n", put, [EpisodeCommit(lease.episode_id, lease.attempt, None, {}, [branched])]))
    batch = desk.take(0)
    assert batch is not None
    assert [e.advantage for e in batch.groups[0].entries] == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert batch.metrics["batch/trajectories"] == 4 and batch.metrics["batch/episodes"] == 2
    assert batch.metrics["reward/mean"] == 0.5


def test_nothing_to_train_on_stops_the_run_with_advice_and_reopening_tries_again() -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, 1, max_dropped_groups=3)))
    desk.start()
    for _ in range(3):
        assert desk.machine.state.failure is None
        desk.commit(desk.lease(2))
    failure = desk.machine.state.failure
    assert failure is not None and failure.kind == "NothingToTrainOn"
    assert "policies.actor.batch.max_dropped_groups=3" in str(failure) and "zero_variance 3" in str(failure)
    desk.restart()
    assert desk.machine.state.failure is None
    check_law(desk.machine)


def test_when_failures_leave_nothing_to_train_on_the_advice_is_about_them() -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, 1, max_dropped_groups=3)))
    desk.start()
    desk.commit(desk.lease(2))  # equal rewards
    for number in range(2):
        desk.commit(desk.lease(2), error=f"overlong: prompt_tokens={600 + number} must be below 512; shorten it")
    failure = desk.machine.state.failure
    assert failure is not None and failure.kind == "NothingToTrainOn"
    assert "overlong (4 episodes): prompt_tokens=600 must be below 512; shorten it" in str(failure)
    assert "overlong 2, zero_variance 1" in str(failure) and "make rewards differ" not in str(failure)


def test_when_no_reward_leaves_nothing_to_train_on_the_workflow_is_named() -> None:
    desk = Desk(small_config(policies__actor=policy_section(2, 1, max_dropped_groups=1)))
    desk.start()
    desk.commit(desk.lease(2), [None, None])
    assert desk.machine.state.policies["actor"].dropped == {"unscored": 1}
    assert "let the workflow return a reward" in str(desk.machine.state.failure)


def test_a_batch_resets_the_count_of_dropped_groups() -> None:
    desk = Desk(small_config(policies__actor=policy_section(1, 1, max_dropped_groups=2)))
    desk.start()
    for version in range(4):
        desk.commit(desk.lease(2))
        desk.play(2, version)
        desk.step(version)
    assert desk.machine.state.failure is None


def test_an_operator_that_fails_stops_the_run_by_name() -> None:
    section = policy_section(operators=[{"type": f"{__name__}:Broken"}])
    import sys

    sys.modules.setdefault(__name__, sys.modules[Broken.__module__])
    desk = Desk(small_config(policies__actor=section))
    desk.start()
    desk.play(2)
    failure = desk.machine.state.failure
    assert failure is not None and "Broken" in str(failure) and "boom" in str(failure)
    assert desk.machine.state.policies["actor"].dropped == {"operator_failed": 1}
    check_law(desk.machine)


class Broken(Operator):
    """An operator with a fault."""

    def on_group(self, group: Group) -> Group | str:
        raise RuntimeError("boom")


def test_each_policy_trains_its_own_rows_and_a_task_is_trained_once_overall() -> None:
    policies = {"actor": policy_section(1, 1), "verifier": policy_section(1, 1)}
    desk = Desk(small_config(run__steps=2, policies=policies))
    desk.start()
    desk.play(2)
    for name in policies:
        batch = desk.step(0, policy=name)
        assert {e.part.policy for g in batch.groups for e in g.entries} == {name}
    assert desk.machine.state.trained == desk.machine.state.admitted == 1
    check_law(desk.machine)


def test_a_step_leaves_one_row_of_metrics(desk: Desk) -> None:
    desk.play(8)
    desk.take(0)
    desk.ack(1, **{"loss": 0.25})
    rows = [i for i in desk.instructions if isinstance(i, c.MetricsRow)]
    assert len(rows) == 1 and rows[0].step == 1
    metrics = rows[0].metrics
    assert metrics["loss"] == 0.25 and metrics["reward/mean"] == 0.5 and metrics["success/mean"] == 0.5
    assert metrics["groups/admitted"] == 4 and metrics["groups/trained"] == 2 and metrics["groups/in_flight"] == 2


def test_a_bound_that_was_lowered_holds_for_what_already_waits() -> None:
    desk = Desk(small_config(run__steps=9, policies={"actor": policy_section(1, 3)}))
    desk.start()
    desk.play(8)
    desk.step(0)
    desk.step(1)
    desk.keep_snapshot()
    desk.config = small_config(run__steps=9, policies={"actor": policy_section(1, 1)})
    desk.restart()
    desk.resume(2)
    assert desk.take(2) is None
    assert desk.machine.state.policies["actor"].dropped == {"stale": 2}


@pytest.mark.parametrize("size", [1, 2, 7, 100, 101])
def test_the_percentile_of_staleness_is_that_of_numpy(size: int) -> None:
    versions = [[i * i % 13] for i in range(size)]
    entries = [Entry(Part("actor", 1, [0], v, 13, 1, 0, 1.0), 0.0, 1.0) for v in versions]
    metrics = batch_metrics([QueuedGroup("train/0/0", 1.0, 0, entries)], 13, 2)
    staleness = [13 - v for (v,) in versions]
    assert metrics["staleness/p99"] == pytest.approx(np.percentile(staleness, 99), abs=1e-9)
