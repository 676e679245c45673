"""Leases, attempts, late and repeated results."""

from __future__ import annotations

import pytest

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import EpisodeCommit
from astraflow.dataflow.views.life import moments_of
from astraflow.dataflow.views.status import status
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config


@pytest.fixture
def desk() -> Desk:
    desk = Desk(small_config())
    desk.start("n", "other")
    return desk


def test_a_repeated_lease_request_gets_the_same_leases(desk: Desk) -> None:
    first = desk.lease(3, request="same")
    assert desk.lease(3, request="same") == first
    assert desk.lease(3, request="new") != first


def test_a_repeated_request_gets_only_what_is_still_held(desk: Desk) -> None:
    first = desk.lease(3, request="same")
    desk.commit(first[:1])
    assert desk.lease(3, request="same") == first[1:]


def test_an_unknown_node_is_told_to_join_again(desk: Desk) -> None:
    with pytest.raises(c.Refusal, match="join again") as caught:
        desk.lease(1, node="stranger")
    assert caught.value.status == 404


def test_joining_again_keeps_the_leases(desk: Desk) -> None:
    leases = desk.lease(2)
    desk.start("n")
    assert list(desk.machine.state.nodes["n"].held) == [lease.episode_id for lease in leases]


def test_a_lease_that_runs_out_is_offered_again_first_with_the_next_attempt(desk: Desk) -> None:
    (lost,) = desk.lease(1)
    desk.now += 25
    desk.machine.live.hear_node("n", desk.now)
    desk.machine.live.hear_node("other", desk.now)
    desk.pass_time(5)
    (again,) = desk.lease(1, node="other")
    assert (again.episode_id, again.attempt) == (lost.episode_id, 2)
    assert desk.commit([lost]) == {lost.episode_id: "refused: attempt 1 is over, attempt 2 is held by other"}
    assert desk.commit([again], node="other") == {again.episode_id: "accepted"}
    assert desk.commit([lost]) == {lost.episode_id: "refused: attempt 1 is over, attempt 2 was accepted"}
    assert desk.machine.state.num_refused == 2


def test_a_live_node_keeps_its_lease_until_the_deadline_of_the_episode(desk: Desk) -> None:
    desk.lease(1)
    for _ in range(29):
        desk.now += 1
        desk.machine.live.hear_node("n", desk.now)
        desk.machine.live.hear_node("other", desk.now)
        assert desk.machine.due(desk.now) is None
    desk.now += 1
    expire = desk.machine.due(desk.now)
    assert expire is not None and len(expire.leases) == 1


def test_a_silent_node_dies_and_its_leases_are_offered_again(desk: Desk) -> None:
    leases = desk.lease(3)
    desk.now = 9.0
    desk.machine.live.hear_node("other", desk.now)
    desk.pass_time(2)
    assert list(desk.machine.state.nodes) == ["other"]
    assert desk.machine.state.num_lost == 3
    again = desk.lease(3, node="other")
    assert [(x.episode_id, x.attempt) for x in again] == [(x.episode_id, 2) for x in leases]
    assert [i.kind for i in desk.instructions if isinstance(i, c.Event)][-1] == "node_died"


def test_a_result_of_a_dead_node_is_refused_while_its_episode_waits(desk: Desk) -> None:
    leases = desk.lease(1)
    desk.do(c.Expire(nodes=["n"]))
    answer = desk.commit(leases)[leases[0].episode_id]
    assert answer == "refused: attempt 1 is over, attempt 2 waits for a node"


def test_draining_gives_leases_back_without_counting_an_attempt_as_lost(desk: Desk) -> None:
    for _ in range(5):
        desk.start("n")
        (lease,) = desk.lease(1)
        desk.do(c.DrainNode("n"))
        desk.do(c.DrainNode("n"))
    assert lease.attempt == 5
    assert desk.machine.state.num_lost == 0 and len(desk.machine.state.groups) == 1


def test_what_a_node_returns_is_offered_again_and_counts_only_if_it_says_so(desk: Desk) -> None:
    first, second, kept = desk.lease(3)
    desk.do(c.ReturnEpisodes("n", [(first.episode_id, 1, False), (second.episode_id, 1, True)]))
    assert list(desk.machine.state.nodes["n"].held) == [kept.episode_id] and desk.machine.state.num_lost == 1
    again = desk.lease(2, node="other")
    assert [(x.episode_id, x.attempt) for x in again] == [(first.episode_id, 2), (second.episode_id, 2)]
    assert desk.commit([first])[first.episode_id] == "refused: attempt 1 is over, attempt 2 is held by other"
    before = desk.machine.snapshot()
    foreign = [(first.episode_id, 2, True), (second.episode_id, 1, True), ("train/9/9/9", 1, True)]
    desk.do(c.ReturnEpisodes("n", foreign))  # held by others, over, never heard of
    assert desk.machine.snapshot() == before
    with pytest.raises(c.Refusal, match="join again"):
        desk.do(c.ReturnEpisodes("stranger", []))


def test_an_episode_that_is_returned_as_lost_too_often_fails(desk: Desk) -> None:
    for attempt in (1, 2):
        (lease,) = desk.lease(1)
        assert lease.attempt == attempt
        desk.do(c.ReturnEpisodes("n", [(lease.episode_id, attempt, True)]))
    (group,) = desk.machine.state.groups.values()
    assert group.results[0] is not None and group.results[0].error == "lost: 2 attempts ended without a result"
    check_law(desk.machine)


def test_an_environment_that_failed_is_tried_again_and_in_the_end_named(desk: Desk) -> None:
    for attempt, kind in ((1, "env_error"), (2, "env_timeout")):
        (lease,) = desk.lease(1)
        assert lease.attempt == attempt
        command = c.CommitEpisodes("n", None, [EpisodeCommit(lease.episode_id, attempt, f"{kind}: broke", {}, [])])
        applied = desk.machine.apply(command, desk.now)
        moments = [(what, fields.get("why")) for _, what, fields in moments_of(command, applied, desk.machine)]
        again = [("lost", "environment failed")] if attempt == 1 else []
        assert moments == [("failed", None), *again]
    (group,) = desk.machine.state.groups.values()
    assert group.results[0] is not None and group.results[0].error == "env_timeout: broke"
    assert desk.machine.state.errors == {"env_error": 1, "env_timeout": 1}
    assert (desk.machine.state.num_episodes, desk.machine.state.num_lost) == (1, 1)
    check_law(desk.machine)


def test_an_exact_duplicate_is_known_also_after_its_group_is_closed(desk: Desk) -> None:
    leases = desk.lease(2)
    assert set(desk.commit(leases, [0.0, 1.0]).values()) == {"accepted"}
    assert desk.machine.state.groups == {}
    assert set(desk.commit(leases, [0.0, 1.0]).values()) == {"duplicate"}
    desk.play(2)
    desk.step(0)
    assert set(desk.commit(leases, [0.0, 1.0]).values()) == {"duplicate"}
    check_law(desk.machine)


def test_so_many_closed_groups_are_remembered_and_no_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "RECENT_GROUPS", 2)
    played = [desk.play(2) for _ in range(3)]
    assert list(desk.machine.state.recent) == [leases[0].group_id for leases in played[1:]]
    assert set(desk.commit(played[1], [0.0, 1.0]).values()) == {"duplicate"}
    gone = f"refused: group {played[0][0].group_id} is not in flight"
    assert set(desk.commit(played[0], [0.0, 1.0]).values()) == {gone}
    check_law(desk.machine)


def test_an_attempt_that_was_never_leased_or_is_held_by_another_node_is_refused(desk: Desk) -> None:
    (lease,) = desk.lease(1)
    answer = desk.commit([lease], node="other")[lease.episode_id]
    assert answer == "refused: attempt 1 is held by n, not by other"
    early = type(lease)(**{f: getattr(lease, f) for f in lease.__struct_fields__} | {"attempt": 3})
    assert desk.commit([early])[lease.episode_id] == "refused: attempt 3 was never leased"


@pytest.mark.parametrize("episode_id", ["train/0/99/0", "nonsense", "train/0/1/x", ""])
def test_an_episode_that_nobody_leased_is_refused(desk: Desk, episode_id: str) -> None:
    (lease,) = desk.lease(1)
    strange = type(lease)(**{f: getattr(lease, f) for f in lease.__struct_fields__} | {"episode_id": episode_id})
    assert desk.commit([strange])[episode_id].startswith("refused: ")


@pytest.mark.parametrize("sibling", ["9" * 5000, "00", "٠", "+0", "0 ", "²", ""])
def test_a_sibling_is_a_number_as_the_service_writes_it(desk: Desk, sibling: str) -> None:
    (lease,) = desk.lease(1)
    name = f"{lease.group_id}/{sibling}"
    commit = c.CommitEpisodes("n", None, [EpisodeCommit(name, lease.attempt, "env: broke", {}, [])])
    applied = desk.machine.apply(commit, desk.now)
    assert applied.reply == {name: f"refused: group {lease.group_id} is not in flight"}
    (moment,) = moments_of(commit, applied, desk.machine)
    assert moment[:2] == (lease.group_id, "refused") and moment[2]["episode"] == -1
    assert desk.machine.leases.unwanted("n", [(name, 1)]) == [(name, 1)]
    assert desk.machine.state.nodes["n"].held == {lease.episode_id: 1}


def test_an_episode_with_an_error_is_unscored_and_counted_by_kind(desk: Desk) -> None:
    leases = desk.lease(2)
    desk.commit(leases[:1], error="timeout: took 20 s")
    desk.commit(leases[1:])
    assert desk.machine.state.errors == {"timeout": 1}
    assert desk.machine.state.first_errors == {"timeout": "took 20 s"}
    assert desk.machine.state.policies["actor"].dropped == {"timeout": 1}
    check_law(desk.machine)


def test_failures_of_one_kind_name_the_drop_and_others_are_unscored(desk: Desk) -> None:
    for errors in (["overlong: a", "overlong: b"], ["overlong: c", "timeout: d"], ["policy='x' is unknown"] * 2):
        leases = desk.lease(2)
        for lease, error in zip(leases, errors, strict=True):
            desk.commit([lease], error=error)
    state = desk.machine.state
    assert state.policies["actor"].dropped == {"overlong": 1, "unscored": 1, "other": 1}
    assert state.first_errors == {"overlong": "a", "timeout": "d", "other": "policy='x' is unknown"}
    told = [i.fields["kind"] for i in desk.instructions if isinstance(i, c.Event) and i.kind == "episode_error"]
    assert told == ["overlong", "timeout", "other"], "each kind is told once"
    shown = status(desk.machine, 0.0)["episodes"]
    assert shown["errors"] == {"overlong": 3, "timeout": 1, "other": 2}
    assert shown["first_errors"] == state.first_errors
    desk.keep_snapshot()
    desk.restart()
    assert desk.machine.state.first_errors == state.first_errors
    check_law(desk.machine)


def test_an_episode_whose_attempts_are_all_lost_counts_as_failed_and_its_group_completes(desk: Desk) -> None:
    leases = desk.lease(2)
    desk.commit(leases[1:])
    for attempt in (1, 2):
        desk.do(c.Expire(leases=[(leases[0].episode_id, attempt)]))
        desk.lease(1, node="other")
    assert desk.machine.state.errors == {"lost": 1}
    assert desk.machine.state.policies["actor"].dropped == {"lost": 1}
    assert desk.commit(leases[:1])[leases[0].episode_id] == "refused: attempt 1 is over, all attempts were lost"
    check_law(desk.machine)


def test_a_node_is_told_which_attempts_of_those_that_it_plays_it_does_not_hold(desk: Desk) -> None:
    lost, kept, done = desk.lease(3)
    desk.commit([done])
    desk.do(c.Expire(leases=[(lost.episode_id, 1)]))
    playing = [(x.episode_id, 1) for x in (lost, kept, done)] + [("never/0/0/0", 1), ("odd", 1)]
    for _ in range(2):  # it is said as often as it is asked, also after a restart
        told = desk.machine.leases.unwanted("n", playing)
        assert told == [(lost.episode_id, 1), ("never/0/0/0", 1), ("odd", 1)]
        desk.restart()
    (again,) = desk.lease(1)
    assert (again.episode_id, again.attempt) == (lost.episode_id, 2)
    assert desk.machine.leases.unwanted("n", [(lost.episode_id, 1), (lost.episode_id, 2)]) == [(lost.episode_id, 1)]
    with pytest.raises(c.Refusal, match="join again"):
        desk.machine.leases.unwanted("stranger", playing)


def test_an_expiry_of_an_attempt_that_is_over_changes_nothing(desk: Desk) -> None:
    leases = desk.lease(2)
    desk.commit(leases, [0.0, 1.0])
    before = desk.machine.snapshot()
    desk.do(c.Expire(leases=[(leases[0].episode_id, 1), ("train/9/9/0", 1)]))
    assert desk.machine.snapshot() == before


def test_a_group_of_one_is_not_unscored() -> None:
    section = {"operators": ["keep_all"]}
    desk = Desk(small_config(workflow__group_size=1, policies__actor={"model": "m", "batch": {"groups": 1}, **section}))
    desk.start()
    desk.commit(desk.lease(1))
    batch = desk.take(0)
    assert batch is not None and [e.advantage for e in batch.groups[0].entries] == [0.0]


def test_a_lease_held_over_a_restart_still_runs_out() -> None:
    desk = Desk(small_config())
    desk.start()
    (lease,) = desk.lease(1)
    desk.restart()
    for _ in range(40):
        desk.now += 1.0
        desk.machine.live.hear_node("n", desk.now)
    expire = desk.pass_time(0.0)
    assert expire is not None and expire.leases == [(lease.episode_id, 1)] and not expire.nodes


def test_a_node_can_have_one_version_more_while_a_step_is_trained(desk: Desk) -> None:
    assert desk.machine.leases.newest() == {"actor": 0}
    desk.play(4)
    assert desk.machine.leases.newest() == {"actor": 0}
    desk.take(0)
    assert desk.machine.leases.newest() == {"actor": 1}  # published before it is acknowledged
    desk.ack(1)
    assert desk.machine.leases.newest() == {"actor": 1}


def test_errors_are_counted_by_at_most_64_kinds_and_other_ones() -> None:
    desk = Desk(small_config(policies={"actor": policy_section(groups=100, max_staleness=1)}))
    desk.start("n")
    for number in range(80):
        desk.commit(desk.lease(1), error=f"kind{number}: it went wrong")
    desk.commit(desk.lease(1), error="kind3: it went wrong again")
    state = desk.machine.state
    assert state.errors == {f"kind{i}": 1 + (i == 3) for i in range(64)} | {"other": 16}
    assert state.first_errors["other"] == "kind64: it went wrong" and len(state.first_errors) == 65


@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_completes_though_environments_never_return(resumed: bool) -> None:
    """An episode of each of the first groups hangs for ever, on a node that lives; others take the place of these."""
    desk = Desk(small_config(policies__actor=policy_section(2, 0)))
    desk.start()
    leases = desk.lease(100)
    hanging = {lease.group_id for lease in leases}
    desk.commit([lease for lease in leases if lease.episode_id.endswith("/0")])
    assert len(hanging) == 2 and desk.take(0) is None
    for _ in range(desk.config.workflow.max_attempts):
        for _ in range(40):
            desk.now += 1
            desk.machine.live.hear_node("n", desk.now)
        desk.pass_time(0)
        if resumed:
            desk.restart()
            desk.resume(0)
        again = [lease for lease in desk.lease(100) if lease.group_id not in hanging]
        desk.commit(again, lambda lease: float(lease.episode_id.endswith("/1")))
    batch = desk.take(0)
    assert batch is not None and not hanging & {group.group_id for group in batch.groups}
    assert desk.machine.state.policies["actor"].dropped == {"lost": 2}
    check_law(desk.machine)
