"""Whole simulations: limits that can be computed by hand, what is conserved, what is repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.config.schema import LoraSection
from astraflow.errors import ConfigError, Problem
from astraflow.simulate.world import Plan, simulate
from simulated import GROUPS, SIZE, STEP_S, TOKENS, TRAIN_S, config_of, profile

ROLLOUT_S = TOKENS * STEP_S


def test_behind_a_barrier_a_step_is_rollout_and_training() -> None:
    config = config_of()
    found = simulate(config, profile(config), Plan(barrier=True))
    step_s = ROLLOUT_S + TRAIN_S
    assert found.policies["actor"].step_s == pytest.approx(step_s)
    assert found.wall_s == pytest.approx(6 * step_s)
    assert found.node_idle == pytest.approx(TRAIN_S / step_s)
    assert found.trainer_idle == pytest.approx(ROLLOUT_S / step_s)
    assert found.tokens_per_s == pytest.approx(GROUPS * SIZE * TOKENS / step_s)


def test_without_staleness_nothing_overlaps() -> None:
    config = config_of(batch={"max_staleness": 0})
    costs = profile(config)
    found, barrier = simulate(config, costs), simulate(config, costs, Plan(barrier=True))
    assert found.policies["actor"] == barrier.policies["actor"]
    assert found.policies["actor"].staleness_max == 0


@pytest.mark.parametrize("train_s", [1.0, 4.0, 9.0])
def test_with_staleness_the_slower_side_sets_the_pace(train_s: float) -> None:
    config = config_of(steps=12)
    found = simulate(config, profile(config, {"trainer": {"step_s": train_s}}))
    assert found.policies["actor"].step_s == pytest.approx(max(ROLLOUT_S, train_s))


def test_a_barrier_adds_up_policies_and_their_own_loops_do_not() -> None:
    config = config_of(policies=["a", "b"], steps=12, batch={"max_staleness": 2})
    costs = profile(config)
    barrier = simulate(config, costs, Plan(barrier=True))
    ours = simulate(config, costs)
    assert barrier.policies["a"].step_s == pytest.approx(2 * ROLLOUT_S + 2 * TRAIN_S)
    assert ours.policies["a"].step_s == ours.policies["b"].step_s == pytest.approx(2 * ROLLOUT_S)


def test_a_node_that_serves_only_some_policies_is_refused() -> None:
    some, every = (config_of(policies=["a", "b"], nodes=[{}, {"serves": serves}]) for serves in (["b"], ["b", "a"]))
    with pytest.raises(ConfigError, match=r"rollout\.nodes\.1\.serves=\['b'\] is not simulated"):
        simulate(some, profile(some))
    assert simulate(every, profile(every)).policies["a"].steps == 6


def test_adapters_of_one_base_share_an_engine() -> None:
    config = config_of(policies=["a", "b"], batch={"max_staleness": 0})
    lora = {name: own.model_copy(update={"lora": LoraSection()}) for name, own in config.policies.items()}
    shared = config.model_copy(update={"policies": lora})
    costs = profile(config, {"engine": {"step_s": 0.0, "row_s": 0.1}})
    apart, one = (simulate(c, costs, Plan(barrier=True)) for c in (config, shared))
    assert one.policies == apart.policies  # they take turns in an episode, so nothing waits for another's rows
    assert one.node_idle == pytest.approx(2 * apart.node_idle - 1)


def test_twice_the_nodes_halve_the_rollout() -> None:
    config = config_of(nodes=[{"concurrency": GROUPS * SIZE // 2}], batch={"max_staleness": 0})
    costs = profile(config)
    one, two = (simulate(config, costs, Plan(num_nodes=n)).policies["actor"].step_s for n in (1, 2))
    assert one == pytest.approx(2 * ROLLOUT_S + TRAIN_S)
    assert two == pytest.approx(ROLLOUT_S + TRAIN_S)


@pytest.mark.parametrize(("staleness", "requests"), [(0, 2), (1, 1)])
def test_a_commit_brings_the_next_leases_where_the_gate_is_open(staleness: int, requests: int) -> None:
    """All episodes of a batch end at once; its commit opens the gate of a synchronous run only when it is trained."""
    config = config_of(steps=20, batch={"max_staleness": staleness})
    quiet = config.model_copy(update={"dataflow": config.dataflow.model_copy(update={"heartbeat_s": 1e6})})
    found = simulate(quiet, profile(config, {"network": {"trips": 2}}))
    of_weights = 2
    assert found.messages_per_step == pytest.approx(2 * (requests + of_weights), abs=0.2)


def test_each_trip_of_a_synchronous_step_costs_its_latency() -> None:
    config, rtt_s = config_of(batch={"max_staleness": 0}), 0.1
    costs = profile(config, {"network": {"rtt_s": rtt_s, "trips": 2}})
    # one way: the commit, then the answer of the lease that says the version; two trips: the fetch
    assert simulate(config, costs).policies["actor"].step_s == pytest.approx(ROLLOUT_S + TRAIN_S + 3 * rtt_s)


def test_bytes_take_their_time_and_an_unlimited_line_takes_none() -> None:
    config = config_of(batch={"max_staleness": 0})
    free = {"message_bytes": 0.0, "episode_bytes": 0.0, "token_bytes": 0.0}
    slow, fast = (profile(config, {"network": {**free, "mbit": mbit}}) for mbit in (0.008, 1e9))
    step_s = ROLLOUT_S + TRAIN_S
    assert simulate(config, slow).policies["actor"].step_s == pytest.approx(step_s + 1.0)  # 1000 bytes of weights
    assert simulate(config, fast).policies["actor"].step_s == pytest.approx(step_s, abs=1e-6)


def test_deltas_send_fewer_bytes() -> None:
    config = config_of(batch={"max_staleness": 0})
    whole, deltas = profile(config), profile(config, {"weights": {"delta_bytes": 10.0}})
    assert simulate(config, whole).weight_bytes_per_step == 1000.0
    assert simulate(config, deltas).weight_bytes_per_step == 10.0


def test_shared_cores_are_shared() -> None:
    config = config_of(steps=30, batch={"max_staleness": 2})
    costs = profile(config, {"serving": {"cores": 1.0}})
    assert simulate(config, costs).policies["actor"].step_s == pytest.approx(ROLLOUT_S + TRAIN_S, rel=0.05)


def test_what_operators_drop_is_played_for_nothing() -> None:
    config = config_of(steps=40, batch={"max_staleness": 0})
    costs = profile(config, {"policies": {"actor": {"kept": 0.5}}})
    found = simulate(config, costs).policies["actor"]
    assert found.dropped["operators"] == pytest.approx(found.trained, rel=0.35)
    assert found.step_s > 1.5 * ROLLOUT_S + TRAIN_S


def test_a_policy_that_nobody_calls_is_said() -> None:
    config = config_of(policies=["a", "b"], batch={"max_dropped_groups": 20})
    costs = profile(
        config, {"episode": {"calls": [{"policy": "a", "tokens": 5}, {"policy": "b", "tokens": 5, "chance": 1e-9}]}}
    )
    with pytest.raises(Problem, match=r"policies\.b: groups dropped in a row=21 must be at most .*20 \(not_called\)"):
        simulate(config, costs)


def test_a_group_in_which_a_policy_was_called_once_is_not_its_own_and_is_no_failure_while_others_train() -> None:
    config = config_of(policies=["a", "b"], steps=2, batch={"max_dropped_groups": 2})
    calls = [{"policy": "a", "tokens": 5}, {"policy": "b", "tokens": 5, "chance": 0.5}]
    groups = {"a": {"groups": 40}, "b": {"groups": 1}}  # in a quarter of them both episodes call b
    b = simulate(config, profile(config, {"episode": {"calls": calls}, "policies": groups}), Plan(seed=1)).policies["b"]
    assert b.trained == 2 and b.dropped["not_called"] > 2


def test_a_seed_says_it_all() -> None:
    config = config_of()
    call = {"policy": "actor", "tokens": 20.0, "spread": 1.0, "delay_s": 1.0, "delay_spread": 1.0}
    costs = profile(config, {"episode": {"calls": [call], "rounds": 1.5}})
    assert simulate(config, costs, Plan(seed=3)) == simulate(config, costs, Plan(seed=3))
    assert simulate(config, costs, Plan(seed=3)) != simulate(config, costs, Plan(seed=4))


def test_tails_make_a_barrier_wait() -> None:
    def lead(spread: float) -> float:
        config = config_of(steps=20, batch={"max_staleness": 4}, nodes=[{"concurrency": 64}])
        costs = profile(config, {"episode": {"calls": [{"policy": "actor", "tokens": 10, "spread": spread}]}})
        barrier = simulate(config, costs, Plan(barrier=True)).policies["actor"].step_s
        return barrier / simulate(config, costs).policies["actor"].step_s

    assert lead(1.2) > 1.2 * lead(0.0)


@settings(max_examples=30, deadline=None)
@given(
    staleness=st.integers(0, 3), groups=st.integers(1, 5), spread=st.floats(0, 1.5), delay_s=st.floats(0, 3),
    kept=st.floats(0.3, 1), nodes=st.integers(1, 3), rtt_s=st.floats(0, 1), train_s=st.floats(0, 10),
    barrier=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_group_is_trained_dropped_or_in_flight(
    staleness: int, groups: int, spread: float, delay_s: float, kept: float, nodes: int, rtt_s: float, train_s: float,
    barrier: bool, seed: int,
) -> None:  # fmt: skip
    config = config_of(policies=["a", "b"], batch={"groups": groups, "max_staleness": staleness})
    calls = [
        {"policy": name, "tokens": 8, "spread": spread, "delay_s": delay_s, "delay_spread": spread, "chance": chance}
        for name, chance in (("a", 1.0), ("b", 0.8))
    ]
    over = {"episode": {"calls": calls}, "network": {"rtt_s": rtt_s}, "trainer": {"step_s": train_s}}
    costs = profile(config, {**over, "policies": {"a": {"kept": kept}}})
    found = simulate(config, costs, Plan(num_nodes=nodes, barrier=barrier, seed=seed))
    for own in found.policies.values():
        assert own.admitted == own.trained + sum(own.dropped.values()) + own.in_flight
        assert own.steps == 6 and own.in_flight >= 0
        assert own.staleness_max <= (0 if barrier else staleness)
        assert 0 <= own.trainer_idle <= 1
        if not barrier:
            assert own.trained == 6 * groups
    assert 0 <= found.node_idle <= 1


def test_fewer_steps_than_the_run_file_can_be_asked_for() -> None:
    config = config_of()
    found = simulate(config, profile(config), Plan(steps=2))
    assert found.policies["actor"].steps == 2
    assert replace(found, policies={}).to_dict()["policies"] == {}
