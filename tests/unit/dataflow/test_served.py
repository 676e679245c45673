"""Policies that are frozen, late, or not called: the machine and the run file."""

from __future__ import annotations

from typing import Any

import pytest

from astraflow.config.load import check_run, load_run
from astraflow.dataflow.machine import commands as c
from astraflow.errors import ConfigError
from astraflow.launch.plan import plan_processes
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config
from astraflow.wire import messages as m


def desk(steps: int = 5, **policies: Any) -> Desk:
    one = Desk(
        small_config(run__steps=steps, policies={name: policy_section(**more) for name, more in policies.items()})
    )
    for name in one.config.trained:
        one.resume(0, policy=name)
    one.do(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id="r")))
    return one


def play(one: Desk, n: int, *called: str) -> None:
    leases = one.lease(n)
    one.commit(leases, lambda lease: float(int(lease.episode_id[-1]) % 2), policies=called)


def served(**more: Any) -> dict[str, Any]:
    return {"model": "tiny-char", **more}


def test_a_frozen_policy_is_leased_at_version_0_and_what_it_said_needs_no_bytes() -> None:
    one = Desk(small_config(policies__judge=served(frozen=True, sampling={"max_tokens": 9})))
    one.resume(0)
    one.do(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id="r")))
    (lease,) = one.lease(1)
    assert lease.min_versions == {"judge": 0, "actor": 0} and lease.sampling["judge"].max_tokens == 9
    leases = [lease, *one.lease(3)]
    one.commit(leases, [0.0, 1.0, 0.0, 1.0])
    check_law(one.machine)
    assert set(one.machine.state.policies) == {"actor"}
    batch = one.step(0)
    assert {entry.part.policy for group in batch.groups for entry in group.entries} == {"actor"}
    with pytest.raises(c.Refusal, match=r"policy=judge is not trained in this run; known: actor"):
        one.resume(0, policy="judge")


def test_tokens_of_a_copy_may_be_of_any_version_of_its_source() -> None:
    one = Desk(small_config(policies__past=served(copy_of={"policy": "actor"}), policies__judge=served(frozen=True)))
    one.resume(0)
    one.do(c.JoinNode(m.Join(node_id="n", name="n", capacity=8, run_id="r")))
    one.play(4)
    one.step(0)
    assert one.machine.leases.newest() == {"actor": 1, "past": 1, "judge": 0}


def test_a_policy_that_is_frozen_until_a_step_takes_no_groups_before_it_and_makes_the_rest_of_the_steps() -> None:
    one = desk(4, actor={"groups": 1}, late={"groups": 1, "frozen_steps": 2})
    actor, late = (one.machine.state.policies[name] for name in ("actor", "late"))
    for version in range(2):
        one.play(2, version)
        assert late.admitted == 0 and one.machine.context.waits("late")
        one.step(version)
    leases = one.lease(2)
    assert leases[0].min_versions == {"actor": 1, "late": 0}
    one.commit(leases, [0.0, 1.0], version=0, policies=["late"])
    assert (actor.admitted, late.admitted) == (3, 1)
    one.step(0, "late")
    for _ in range(3):
        play(one, 2, "actor", "late")
    assert late.latest == 1 and one.machine.context.progress("late") == 3
    one.step(1, "late")
    assert one.machine.context.finished_policy("late") and not one.machine.finished
    with pytest.raises(c.Refusal, match=r"run\.steps"):
        one.take(2, policy="late")
    check_law(one.machine)


def test_late_policies_wait_for_those_before_them_and_not_for_each_other() -> None:
    one = desk(6, actor={"groups": 1}, b={"frozen_steps": 2}, c={"frozen_steps": 2}, last={"frozen_steps": 4})
    waits, policies = one.machine.context.waits, one.machine.state.policies
    for version in range(2):
        one.play(2, version)
        one.step(version)
    assert [name for name in policies if waits(name)] == ["last"]
    for step in (3, 4):
        policies["actor"].latest, policies["b"].latest = step, step - 2
        assert waits("last"), "for c, which made none of its steps yet"
    policies["c"].latest = 2
    assert not waits("last")


def test_each_policy_has_its_own_bound_of_staleness() -> None:
    one = desk(9, strict={"groups": 1, "max_staleness": 0}, loose={"groups": 1, "max_staleness": 3})
    policies = one.machine.state.policies
    policies["strict"].latest = policies["loose"].latest = 5
    leases = one.lease(2)
    assert leases[0].min_versions == {"strict": 5, "loose": 2}
    one.commit(leases, [0.0, 1.0], version=2)
    assert policies["strict"].dropped == {"stale": 1} and policies["loose"].num_waiting == 1
    policies["loose"].latest = 6
    assert one.take(6, policy="loose") is None and policies["loose"].dropped == {"stale": 1}


def test_a_late_policy_does_not_hold_evaluation_rounds_back() -> None:
    changes = {"evaluation": {"source": "held", "every": 2, "num_tasks": 1}, "run__steps": 4}
    policies = {"actor": policy_section(1), "late": policy_section(1, frozen_steps=2)}
    one = Desk(small_config(policies=policies, **changes))
    one.start()
    one.commit(one.lease(1), [1.0])
    for version in range(2):
        one.play(2, version)
        one.step(version)
    (lease,) = [lease for lease in one.lease(4) if lease.purpose == "eval"]
    assert lease.min_versions == {"actor": 2, "late": 0}
    assert one.machine.context.plan.version_in("late", 4) == 2


def test_a_policy_that_was_not_called_gets_none_and_frees_its_slot() -> None:
    one = desk(actor={}, helper={})
    play(one, 4, "actor")
    helper = one.machine.state.policies["helper"]
    assert helper.dropped == {"not_called": 2} and helper.in_flight == 0 == helper.failed_in_row
    check_law(one.machine)
    one.step(0)
    play(one, 2, "actor", "helper")
    assert helper.num_waiting == 1


def test_a_group_may_be_complete_for_one_policy_and_too_small_for_another() -> None:
    one = desk(actor={}, helper={})
    leases = one.lease(2)
    one.commit(leases[:1], [1.0], policies=["actor", "helper"])
    one.commit(leases[1:], [0.0], policies=["actor"])
    assert one.machine.state.policies["actor"].num_waiting == 1
    assert one.machine.state.policies["helper"].dropped == {"not_called": 1}
    check_law(one.machine)


def test_a_policy_that_is_never_called_ends_the_run_with_advice_once_the_others_have_made_their_steps() -> None:
    one = desk(2, actor={"groups": 1}, helper={"max_dropped_groups": 2})
    for version in range(2):
        one.commit(one.lease(2), [0.0, 1.0], version=version, policies=["actor"])
        one.step(version)
    assert one.machine.state.failure is None and one.machine.state.policies["helper"].dropped == {"not_called": 2}
    play(one, 4, "actor")
    failure = str(one.machine.state.failure)
    assert "policies.helper.batch.max_dropped_groups=2" in failure and "not_called 4" in failure
    assert "let the workflow call this policy" in failure


def test_who_waits_for_whom_is_counted_in_seconds() -> None:
    one = desk(actor={"groups": 1, "max_staleness": 0}, slow={"groups": 1, "max_staleness": 1})
    waited = {name: policy.waited for name, policy in one.machine.state.policies.items()}
    one.now = 2.0
    leases = one.lease(2)  # the actor's slot is taken: it waits for its own group, the other one for it
    one.now = 5.0
    one.commit(leases, [0.0, 1.0])
    assert waited == {"actor": {"rollout": 5.0}, "slow": {"rollout": 2.0, "actor": 3.0}}
    one.now = 9.0
    one.step(0)
    assert waited["actor"] == {"rollout": 5.0, "training": 4.0} and waited["slow"]["training"] == 4.0
    before = one.machine.snapshot()
    one.keep_snapshot()
    one.restart()
    assert one.machine.snapshot() == before


def test_with_one_policy_nothing_is_measured() -> None:
    one = desk(actor={})
    one.now = 4.0
    one.lease(1)
    assert one.machine.state.policies["actor"].waited == {}


def raw(**policies: Any) -> dict[str, Any]:
    return {
        "run": {"name": "x", "steps": 10}, "sources": {"train": "sums"}, "policies": policies,
        "workflow": {"type": "single_turn", "reward": "sums"},
    }  # fmt: skip


TRAINED = {"model": "tiny-char"}


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({}, "policies={} must name at least one policy"),
        ({"a": served(frozen=True)}, "policies=a has nothing to train"),
        ({"a": TRAINED, "A": TRAINED}, "policies.A differs from policies.a by case only"),
        ({"a": TRAINED, "b": served(frozen=True, trainer={"ranks": 2})}, "policies.b.trainer has no effect with"),
        ({"a": TRAINED, "b": served(frozen=True, optimizer={"lr": 1.0})}, "policies.b.optimizer has no effect with"),
        ({"a": TRAINED, "b": served(frozen=True, frozen_steps=2)}, "policies.b.frozen_steps has no effect with"),
        ({"a": TRAINED, "b": served(frozen=True, copy_of={"policy": "a"})}, "cannot be beside policies.b.copy_of"),
        ({"a": TRAINED, "b": served(copy_of={"policy": "c"})}, "copy_of.policy='c' names no policy that is trained"),
        ({"a": TRAINED, "b": served(copy_of={"policy": "b"})}, "copy_of.policy='b' names no policy that is trained"),
        ({"a": TRAINED, "b": {"model": "tiny-char-small", "copy_of": {"policy": "a"}}}, "must be that of policies.a"),
        ({"a": TRAINED, "b": served(frozen_steps=10)}, "frozen_steps=10 must be below run.steps=10"),
        ({"a": served(frozen_steps=1), "b": served(frozen_steps=2)}, "must be 0 for at least one policy"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be_are_refused_at_load(policies: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(raw(**policies), "x")
    assert said in str(caught.value)


def test_two_policies_of_one_name_are_no_toml(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[policies.a]\nmodel = "tiny-char"\n[policies.a]\nmodel = "tiny-char"\n')
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*policies.*a"):
        load_run(path)


def test_a_frozen_policy_has_no_trainer_and_no_operator_that_needs_siblings() -> None:
    config = check_run({**raw(a=TRAINED, b=served(frozen=True), c=served(copy_of={"policy": "a"}))}, "x")
    assert [spec.name for spec in plan_processes(config, 2)] == ["dataflow", "trainer-a", "node-node"]
    assert (config.steps_of("a"), config.steps_of("b"), config.steps_of("c")) == (10, 0, 0)
