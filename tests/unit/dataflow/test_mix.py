"""Shares of several training sources: exact counts per window, schedules, sources that cannot give."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.config.schema import RunConfig
from astraflow.dataflow.machine.admission import mix
from astraflow.dataflow.machine.plan import MixPlan
from astraflow.dataflow.machine.records import SourceState
from astraflow.testing.dataflow import Desk, Rows, check_law, policy_section, small_config

RATIOS = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


def picks(plan: MixPlan, steps: list[int]) -> tuple[list[str], np.ndarray]:
    """The source of each pick, at each of `steps`, and the shares that were in force."""
    sources = {name: SourceState() for name in plan.ratios}
    names, parts = [], []
    for step in steps:
        share = mix.shares(plan, step)
        able = [name for name in share if share[name] > 0]
        name = mix.pick(sources, share, able)
        mix.pay(sources, share, able, name)
        names.append(name)
        parts.append(list(share.values()))
    return names, np.array(parts)


def lags(plan: MixPlan, steps: list[int]) -> np.ndarray:
    """[picks + 1, sources] how far each count is ahead of the sum of its shares."""
    names, parts = picks(plan, steps)
    counts = np.array([[name == known for known in plan.ratios] for name in names], float)
    return np.vstack([np.zeros(len(plan.ratios)), np.cumsum(counts - parts, axis=0)])


def constant(*ratios: float) -> MixPlan:
    return MixPlan({f"s{i}": (r, r) for i, r in enumerate(ratios)}, "linear", 1)


@given(RATIOS)
@settings(max_examples=60, deadline=None)
def test_every_count_is_within_1_of_its_share_of_all_picks(ratios: list[int]) -> None:
    assert np.abs(lags(constant(*ratios), [0] * 300)).max() < 1 + 1e-6


def test_also_where_picking_the_largest_credit_would_not_be() -> None:
    assert np.abs(lags(constant(1, 3, 50, 10, 50, 1, 1, 1, 50), [0] * 334)).max() < 1 + 1e-6


@given(RATIOS)
@settings(max_examples=60, deadline=None)
def test_every_window_is_within_2_and_with_two_sources_within_1(ratios: list[int]) -> None:
    for some, bound in ((ratios, 2), (ratios[:2], 1)):
        seen = lags(constant(*some), [0] * 300)
        assert (seen.max(axis=0) - seen.min(axis=0)).max() < bound + 1e-6


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_share_that_moves_gives_the_totals_of_its_integral(schedule: str) -> None:
    plan = MixPlan({"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (1.0, 1.0)}, schedule, 100)  # type: ignore[arg-type]
    steps = [i // 16 for i in range(16 * 100)]
    seen = lags(plan, steps)
    assert np.abs(seen).max() < 1.5
    counts = Counter(picks(plan, steps)[0])
    assert [counts[x] for x in "abc"] == pytest.approx([400, 400, 800], abs=10)  # the mean step is 49.5, not 50
    assert mix.shares(plan, 0) == {"a": 0.5, "b": 0.0, "c": 0.5}
    assert mix.shares(plan, 100) == mix.shares(plan, 1000) == {"a": 0.0, "b": 0.5, "c": 0.5}
    quarter = {"linear": 0.25, "cosine": (1 - math.cos(math.pi / 4)) / 2}[schedule]
    assert mix.shares(plan, 25)["b"] == pytest.approx(quarter / 2)


def mixed(ratios: dict[str, object], groups: int = 4, **changes: object) -> RunConfig:
    return small_config(
        run__steps=1000,
        sources={"a": {"type": "sums"}, "b": {"type": "sums"}, "held": {"type": "sums"}},
        mix={"ratios": ratios},
        policies__actor=policy_section(groups, 1),
        **changes,
    )


def desk_of(config: RunConfig, a: int = 10, b: int = 7) -> Desk:
    desk = Desk(config, {"a": Rows(a), "b": Rows(b, "b"), "held": Rows(3)})
    desk.start()
    return desk


def train(desk: Desk, num_steps: int) -> list[str]:
    """Play and train; the sources of the groups in the order of admission."""
    first, sources = desk.machine.state.policies["actor"].latest, {}
    for version in range(first, first + num_steps):
        while True:
            leases = desk.play(8, version)
            sources |= {x.group_id: x.task.source for x in leases}
            check_law(desk.machine)
            if not leases:
                break
        desk.step(version)
    return list(sources.values())


def test_groups_come_from_the_sources_by_ratio_with_a_cursor_each() -> None:
    desk = desk_of(mixed({"a": 3, "b": 1}))
    seen = train(desk, 10)
    assert len(seen) == 44
    assert Counter(seen) == {"a": 33, "b": 11}
    a, b = desk.machine.state.sources["a"], desk.machine.state.sources["b"]
    assert (a.epoch, a.position, b.epoch, b.position) == (3, 3, 1, 4)
    assert (a.admitted, a.in_flight, b.admitted, b.in_flight) == (33, 3, 11, 1)


def test_a_schedule_follows_the_newest_step_of_the_slowest_policy() -> None:
    config = mixed({"a": [1, 0], "b": [0, 1]}, mix__steps=4)
    desk = desk_of(config)
    assert set(train(desk, 1)[:8]) == {"a"}
    train(desk, 3)
    assert desk.machine.admission.shares() == {"a": 0.0, "b": 1.0}
    assert set(train(desk, 1)) == {"b"}


def test_without_mix_steps_shares_move_over_the_whole_run() -> None:
    desk = desk_of(mixed({"a": [1, 0], "b": [0, 1]}))
    desk.machine.state.policies["actor"].latest = 500
    assert desk.machine.admission.shares() == {"a": 0.5, "b": 0.5}


def test_each_source_has_its_own_group_size() -> None:
    config = mixed({"a": 1, "b": 1})
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw["sources"]["b"]["group_size"] = 5
    desk = desk_of(RunConfig.model_validate(raw))
    leases = desk.lease(100)
    sizes = Counter(x.group_id for x in leases)
    assert {(g.split("/")[0], n) for g, n in sizes.items()} == {("a", 2), ("b", 5)}
    desk.commit(leases, lambda lease: float(int(lease.episode_id[-1]) % 2))
    check_law(desk.machine)


def test_a_restart_goes_on_with_the_same_tasks() -> None:
    config = mixed({"a": 3, "b": [1, 2]}, mix__steps=5)
    once, twice = desk_of(config), desk_of(config)
    expected = train(once, 6)
    seen = train(twice, 2)
    twice.keep_snapshot()
    seen += train(twice, 1)
    twice.restart()
    seen += train(twice, 3)
    assert seen == expected
    assert twice.machine.state.sources == once.machine.state.sources


def test_a_source_that_cannot_give_neither_stalls_the_others_nor_bursts_later() -> None:
    sources = {name: SourceState() for name in "abc"}
    share = {"a": 0.5, "b": 0.3, "c": 0.2}
    seen: list[str] = []
    for i in range(400):
        able = [x for x in share if x != "a" or not 100 <= i < 200]
        name = mix.pick(sources, share, able)
        mix.pay(sources, share, able, name)
        seen.append(name)
    assert Counter(seen[100:200]) == {"b": 60, "c": 40}
    assert Counter(seen[200:220])["a"] <= 12, "no burst"
    assert Counter(seen[200:]) == pytest.approx({"a": 100, "b": 60, "c": 40}, abs=2)
