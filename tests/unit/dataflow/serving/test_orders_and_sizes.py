"""What leaves the queue first, how much a batch is, and that the gate follows it."""

from __future__ import annotations

import json

import pytest

from astraflow.config.schema import RunConfig
from astraflow.dataflow.machine.commands import MetricsRow
from astraflow.dataflow.machine.records import Batch, Entry, Part, PolicyState, QueuedGroup
from astraflow.dataflow.machine.serving import pacing
from astraflow.dataflow.machine.serving.waiting import Waiting
from astraflow.dataflow.views.status import status
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config, sources
from astraflow.types import EpisodeLease


def config(group_size: int = 2, steps: int = 8, groups: int = 2, max_staleness: int = 1, **batch: object) -> RunConfig:
    section = policy_section(groups, max_staleness)
    section["batch"] |= batch
    return small_config(run__steps=steps, workflow__group_size=group_size, policies={"actor": section})


def started(run: RunConfig) -> Desk:
    desk = Desk(run, sources(1000))
    desk.start()
    return desk


def ids(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [g.group_id for g in batch.groups]


def rewards(leases: list[EpisodeLease]) -> list[float]:
    return [float(int(x.episode_id[-1]) % 2) for x in leases]


def as_json(desk: Desk) -> object:
    return json.loads(desk.machine.snapshot())


@pytest.mark.parametrize(("order", "first"), [("edf", [1, 2, 0]), ("fifo", [0, 1, 2])])
def test_the_order_is_by_oldest_version_or_by_arrival(order: str, first: list[int]) -> None:
    desk = started(config(groups=3, order=order))
    leases = desk.lease(6)
    groups = [leases[0:2], leases[2:4], leases[4:6]]
    for members, version in zip(groups, (1, 0, 0), strict=True):
        desk.commit(members, [0.0, 1.0], version=version)
    assert ids(desk.take(0)) == [groups[i][0].group_id for i in first]


def test_in_order_of_arrival_a_group_that_grows_too_old_is_dropped_though_others_are_before_it() -> None:
    desk = started(config(groups=1, max_staleness=2, order="fifo"))
    policy = desk.machine.state.policies["actor"]
    slow = desk.lease(6)
    desk.commit(slow[2:], rewards(slow[2:]))
    desk.step(0)
    desk.step(1)
    later = desk.lease(4)
    desk.commit(later, rewards(later), version=2)
    desk.commit(slow[:2], [0.0, 1.0], version=0)
    assert len(policy.queue) == 3
    assert ids(desk.step(2)) == [later[0].group_id]
    assert policy.dropped == {"stale": 1}
    assert [g.group_id for g in policy.queue.values()] == [later[2].group_id]
    check_law(desk.machine)


def test_the_bound_holds_in_order_of_arrival_and_drops_are_counted() -> None:
    desk = started(config(groups=1, max_staleness=0, order="fifo", steps=3))
    policy = desk.machine.state.policies["actor"]
    old = desk.lease(2)
    desk.commit(old[:1], [0.0])
    desk.commit(old[1:], [1.0])
    batch = desk.step(0)
    assert ids(batch) == [old[0].group_id]
    desk.play(2, 0)  # sampled by a version that is too old by now
    assert policy.dropped == {"stale": 1}
    check_law(desk.machine)


def test_keys_of_groups_that_left_do_not_pile_up() -> None:
    waiting = Waiting(PolicyState(), "fifo")
    part = Part("actor", 1, [0], [5], 5, 3, 0, 1.0)
    for number in range(1000):
        waiting.push(QueuedGroup(f"train/0/{number}", 1.0, 5, [Entry(part, 0.5, 1.0)]))
        assert waiting.pop()[1].group_id == f"train/0/{number}"
    assert len(waiting._ages) + len(waiting._order) < 200
    assert waiting.size == waiting.last_chance(5) == (0, 0, 0)


def play_tokens(desk: Desk, sizes: list[int], version: int = 0) -> None:
    """One group of two episodes for each size: sampled tokens of an episode."""
    for tokens in sizes:
        leases = desk.lease(2)
        assert len(leases) == 2, "the gate is closed"
        desk.commit(leases, [0.0, 1.0], version=version, tokens=tokens)


def test_a_batch_closes_at_its_tokens_or_its_groups_whichever_is_first() -> None:
    desk = started(config(groups=4, tokens=40, max_staleness=3))
    play_tokens(desk, [10])
    assert desk.take(0) is None
    play_tokens(desk, [10])
    assert len(ids(desk.step(0))) == 2
    play_tokens(desk, [1, 1, 1])
    assert desk.take(1) is None
    play_tokens(desk, [1])
    assert len(ids(desk.take(1))) == 4


def test_one_group_is_a_batch_when_it_has_the_tokens() -> None:
    desk = started(config(groups=4, tokens=10, max_staleness=3))
    play_tokens(desk, [500])
    assert len(ids(desk.take(0))) == 1


def test_with_a_token_budget_the_gate_follows_the_groups_of_the_last_batches() -> None:
    """Without that, 2 * 16 groups would be in flight where a batch takes 2, and nearly all would grow stale."""
    desk = started(config(groups=16, tokens=40, max_staleness=1, steps=40))
    policy = desk.machine.state.policies["actor"]
    for version in range(30):
        while len(leases := desk.lease(2)) == 2:
            desk.commit(leases, [0.0, 1.0], version=version, tokens=10)
        desk.step(version)
        check_law(desk.machine)
    assert sum(policy.dropped.values()) == 0
    assert desk.machine.admission.limit("actor") == 4


def test_a_mean_that_is_too_small_never_stops_the_run() -> None:
    desk = started(config(groups=16, tokens=400, max_staleness=0, steps=12))
    for version in range(12):
        tokens = 100 if version < 6 else 1  # groups shrink: 16 of them are needed, not 2
        while desk.take(version) is None:
            leases = desk.lease(2)
            assert leases, f"version {version}: neither a batch nor a task"
            desk.commit(leases, [0.0, 1.0], version=version, tokens=tokens)
        desk.ack(version + 1)
    assert desk.machine.finished
    check_law(desk.machine)


def test_a_batch_of_episodes_cuts_a_group_and_its_rest_goes_first() -> None:
    desk = started(config(group_size=4, groups=16, episodes=6, max_staleness=2))
    policy = desk.machine.state.policies["actor"]
    leases = desk.lease(12)
    for k in range(0, 12, 4):
        desk.commit(leases[k : k + 4], rewards(leases[k : k + 4]))
    a, b, c = (leases[k].group_id for k in range(0, 12, 4))
    first = desk.step(0)
    assert [(g.group_id, len(g.entries)) for g in first.groups] == [(a, 4), (b, 2)]
    assert policy.trained == 1 and policy.in_flight == 2, "b is trained when its last piece is"
    check_law(desk.machine)
    second = desk.step(1)
    assert [(g.group_id, len(g.entries)) for g in second.groups] == [(b, 2), (c, 4)]
    siblings = [e.sibling for g in (first.groups[1], second.groups[0]) for e in g.entries]
    assert siblings == [0, 1, 2, 3]
    assert policy.trained == 3 and policy.rest is None
    check_law(desk.machine)


def test_a_group_larger_than_a_batch_is_cut_again_and_again() -> None:
    desk = started(config(group_size=8, groups=16, episodes=3, max_staleness=3))
    leases = desk.lease(8)
    desk.commit(leases, rewards(leases))
    sizes = [[len(g.entries) for g in desk.step(v).groups] for v in range(2)]
    assert sizes == [[3], [3]] and desk.take(2) is None
    assert desk.machine.state.policies["actor"].trained == 0
    check_law(desk.machine)


def test_a_rest_that_grows_stale_leaves_its_group_trained_and_its_episodes_counted() -> None:
    desk = started(config(group_size=4, groups=16, episodes=3, max_staleness=0))
    policy = desk.machine.state.policies["actor"]
    leases = desk.lease(4)
    desk.commit(leases, rewards(leases))
    desk.step(0)
    assert policy.trained == 1 and policy.dropped == {} and policy.dropped_episodes == {"stale": 1}
    assert status(desk.machine, 0.0)["policies"]["actor"]["dropped_episodes"] == {"stale": 1}
    assert desk.machine.state.trained == 1 and desk.machine.state.tasks == {}
    check_law(desk.machine)
    desk.cover(1)
    assert desk.machine.state.puts == {}


def test_at_the_end_a_rest_is_dropped_as_finished_and_its_group_counts_as_trained() -> None:
    desk = started(config(group_size=4, groups=16, episodes=3, max_staleness=1, steps=1))
    leases = desk.lease(4)
    desk.commit(leases, rewards(leases))
    desk.step(0)
    policy = desk.machine.state.policies["actor"]
    assert (policy.trained, policy.dropped_episodes) == (1, {"finished": 1})
    check_law(desk.machine)


def test_batches_of_episodes_go_on_over_a_restart_and_a_resume() -> None:
    desk = started(config(group_size=4, groups=16, episodes=6, max_staleness=2))
    leases = desk.lease(12)
    desk.commit(leases, rewards(leases))
    served = [ids(desk.step(0))]
    desk.keep_snapshot()
    before = as_json(desk)
    desk.restart()
    assert as_json(desk) == before
    served.append(ids(desk.step(1)))
    desk.resume(0, trainer="t2")
    assert [ids(desk.take(v, trainer="t2")) for v in range(2)] == served
    check_law(desk.machine)


def test_the_gate_of_episode_batches_counts_pieces_as_fractions() -> None:
    desk = started(config(group_size=4, groups=16, episodes=2, max_staleness=1, steps=40))
    policy = desk.machine.state.policies["actor"]
    for version in range(20):
        while leases := desk.lease(4):
            desk.commit(leases, rewards(leases), version=version)
        desk.step(version)
        check_law(desk.machine)
    assert pacing.fresh_groups(desk.machine.context.plan.policies["actor"], policy) == pytest.approx(0.5)
    assert sum(policy.dropped.values()) + sum(policy.dropped_episodes.values()) == 0


def test_episodes_that_their_group_goes_without_are_counted_by_reason() -> None:
    section = policy_section(1, 0, operators=[{"type": "length_filter", "max_tokens": 5, "min_episodes": 2}])
    desk = started(small_config(workflow__group_size=5, policies={"actor": section}))
    leases = desk.lease(5)
    desk.commit(leases[:2], [0.0, 1.0])
    desk.commit(leases[2:3], [1.0], tokens=9)
    desk.commit(leases[3:4], [None])
    desk.commit(leases[4:], [1.0], error="env: broke")
    assert [len(g.entries) for g in desk.take(0).groups] == [2]
    state = desk.machine.state
    assert state.policies["actor"].dropped_episodes == {"unscored": 1, "left_out": 1}
    assert state.errors == {"env": 1}
    desk.ack(1)
    rows = [i for i in desk.instructions if isinstance(i, MetricsRow)]
    assert rows[0].metrics["episodes/dropped/left_out"] == 1
    check_law(desk.machine)
