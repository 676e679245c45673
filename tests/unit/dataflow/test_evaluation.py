"""Evaluation rounds beside training."""

from __future__ import annotations

import pytest

from astraflow.dataflow.machine import commands as c
from astraflow.errors import DataflowError
from astraflow.estimates import wilson
from astraflow.testing.dataflow import Desk, check_law, small_config
from astraflow.types import EpisodeLease
from astraflow.wire import messages as m

SECTION = {"source": "held", "every": 2, "samples": 2}


@pytest.fixture
def desk() -> Desk:
    desk = Desk(small_config(evaluation=SECTION))
    desk.start()
    return desk


def lease_eval(desk: Desk, n: int = 1000) -> list[EpisodeLease]:
    return [lease for lease in desk.lease(n) if lease.purpose == "eval"]


def finish_rounds(desk: Desk, reward: float = 1.0, version: int = 0) -> None:
    while desk.machine.evaluation.waiting:
        leases = desk.lease(100)
        desk.commit([x for x in leases if x.purpose == "eval"], lambda x: reward, version=version)
        training = [x for x in leases if x.purpose == "train"]
        desk.commit(training, lambda x: float(int(x.episode_id[-1]) % 2), version=version)


def test_a_round_is_due_at_the_start_every_so_many_steps_and_at_the_end(desk: Desk) -> None:
    for version in range(5):
        finish_rounds(desk, version=version)
        desk.play(100, version)
        desk.step(version)
    assert not desk.machine.finished
    finish_rounds(desk, version=5)
    assert desk.machine.finished
    assert [r["eval/version"] for r in desk.machine.state.results] == [0, 2, 4, 5]
    check_law(desk.machine)


def test_evaluation_takes_at_most_half_of_a_reply_while_there_is_training_work(desk: Desk) -> None:
    purposes = [lease.purpose for lease in desk.lease(6)]
    assert purposes.count("eval") == 3
    assert [lease.purpose for lease in desk.lease(100)].count("train") == 5


def test_single_leases_alternate(desk: Desk) -> None:
    assert [desk.lease(1)[0].purpose for _ in range(6)] == ["eval", "train"] * 3


def test_an_evaluation_lease_is_greedy_bound_to_its_version_and_named(desk: Desk) -> None:
    lease = lease_eval(desk)[0]
    assert lease.group_id == "eval/0/held/0" and lease.episode_id == "eval/0/held/0/0"
    assert lease.sampling["actor"].temperature == 0.0
    assert lease.min_versions == {"actor": 0}
    assert lease.task.source == "held" and lease.task.row == 0


def test_a_later_round_asks_for_its_version(desk: Desk) -> None:
    finish_rounds(desk)
    for version in range(2):
        desk.play(100, version)
        desk.step(version)
    assert lease_eval(desk)[0].min_versions == {"actor": 2}


def test_evaluation_does_not_pass_the_gate_and_does_not_count_as_admitted(desk: Desk) -> None:
    leases = desk.lease(1000)
    assert sum(x.purpose == "eval" for x in leases) == 6
    assert desk.machine.state.admitted == 4


def test_the_result_counts_successes_failures_and_versions(desk: Desk) -> None:
    leases = lease_eval(desk)
    by_task = [leases[0:2], leases[2:4], leases[4:6]]
    desk.commit(by_task[0], [1.0, 0.5], version=0)
    desk.commit(by_task[1], [0.0, 0.5], version=1)
    desk.commit(by_task[2][:1], [1.0], version=3)
    desk.commit(by_task[2][1:], error="timeout: slow")
    (result,) = desk.machine.state.results
    assert result["eval/reward"] == pytest.approx(3.0 / 5)
    assert result["eval/success"] == pytest.approx(2 / 5)
    assert result["eval/avg@2"] == pytest.approx((1 / 2 + 0 + 1) / 3)  # the failed one is no zero
    assert result["eval/pass@1"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert result["eval/pass@2"] == pytest.approx(1 / 2)  # of the two tasks with two scored episodes
    assert (result["eval/avg@2/low"], result["eval/avg@2/high"]) == pytest.approx(wilson(0.5, 4.5))
    assert (result["eval/pass@2/low"], result["eval/pass@2/high"]) == pytest.approx(wilson(0.5, 2))
    assert result["eval/num_failed"] == 1 and result["eval/num_episodes"] == 6
    assert (result["eval/min_version"], result["eval/max_version"]) == (0, 3)
    rows = [i for i in desk.instructions if isinstance(i, c.MetricsRow)]
    assert [(r.kind, r.step) for r in rows] == [("eval", 0)]


def test_a_round_of_which_nothing_was_scored_says_nothing(desk: Desk) -> None:
    for lease in lease_eval(desk):
        desk.commit([lease], error="timeout: slow")
    (result,) = desk.machine.state.results
    assert result["eval/num_failed"] == 6 and not {
        n for n in result if "@" in n or n in ("eval/success", "eval/reward")
    }


def test_a_lost_evaluation_episode_is_offered_again_and_then_failed(desk: Desk) -> None:
    leases = lease_eval(desk)
    desk.commit(leases[1:])
    for attempt in (1, 2):
        desk.do(c.Expire(leases=[(leases[0].episode_id, attempt)]))
        desk.lease(100)
    assert desk.machine.state.results[0]["eval/num_failed"] == 1


def test_a_round_survives_a_restart(desk: Desk) -> None:
    leases = lease_eval(desk)
    desk.commit(leases[:3])
    desk.keep_snapshot()
    desk.commit(leases[3:4])
    desk.restart()
    assert set(desk.commit(leases[:4]).values()) == {"duplicate"}
    desk.commit(leases[4:])
    (result,) = desk.machine.state.results
    assert result["eval/num_episodes"] == 6 and result["eval/pass@2"] == result["eval/pass@2/high"] == 1.0


def test_without_the_section_there_is_no_round() -> None:
    desk = Desk(small_config(run__steps=1))
    desk.start()
    desk.play(4)
    desk.step(0)
    assert desk.machine.finished and desk.machine.state.results == []


def test_a_run_that_is_made_longer_has_its_further_rounds() -> None:
    desk = Desk(small_config(run__steps=1, evaluation=SECTION))
    desk.start()
    for version in range(5):
        finish_rounds(desk, version=version)
        if desk.machine.finished:
            desk.keep_snapshot()
            desk.config = small_config(run__steps=5, evaluation=SECTION)
            desk.restart()
        desk.play(100, version)
        desk.step(version)
    finish_rounds(desk, version=5)
    assert desk.machine.finished
    assert [r["eval/version"] for r in desk.machine.state.results] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("played", [1, 3])
def test_a_run_that_is_made_shorter_still_ends_with_a_round(played: int) -> None:
    desk = Desk(small_config(run__steps=9, evaluation={**SECTION, "every": 9}))
    desk.start()
    for version in range(played):
        finish_rounds(desk, version=version)
        desk.play(100, version)
        desk.step(version)
    desk.keep_snapshot()
    desk.config = small_config(run__steps=2, evaluation={**SECTION, "every": 9})
    desk.restart()
    desk.resume(played)
    for version in range(played, 2):
        desk.play(100, version)
        desk.step(version)
    finish_rounds(desk, version=max(played, 2))
    assert desk.machine.finished
    assert [r["eval/version"] for r in desk.machine.state.results] == [0, 2]


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_cut_at_its_newest_version_has_one_round_of_it(finished: bool) -> None:
    desk = Desk(small_config(run__steps=9, evaluation={**SECTION, "every": 2}))
    desk.start()
    for version in range(2):
        finish_rounds(desk, version=version)
        desk.play(100, version)
        desk.step(version)
    if finished:
        finish_rounds(desk, version=2)
    else:
        assert "eval" in {lease.purpose for lease in desk.lease(2)}
    desk.keep_snapshot()
    desk.config = small_config(run__steps=2, evaluation={**SECTION, "every": 2})
    desk.restart()
    desk.resume(2)
    desk.pass_time(1000.0)
    desk.do(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id="r")))
    finish_rounds(desk, version=2)
    assert desk.machine.finished
    assert [r["eval/version"] for r in desk.machine.state.results] == [0, 2]


def test_a_number_that_is_not_finite_makes_no_snapshot_that_no_start_could_read(desk: Desk) -> None:
    desk.machine.state.rounds[0].success_sum = float("inf")
    with pytest.raises(DataflowError, match=r"dataflow.state=.*null.*success_sum.* cannot be read again"):
        desk.machine.snapshot()
