from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astraflow.rollout.pacing.concurrency import Concurrency

EASY = {"running": 8.0, "waiting": 0.0, "kv_usage": 0.2, "preempted": 3.0}
stats = st.fixed_dictionaries({
    "running": st.floats(0, 100), "waiting": st.floats(0, 100), "kv_usage": st.floats(0, 1),
    "preempted": st.floats(0, 9),
})  # fmt: skip


def test_without_a_lower_bound_it_stays() -> None:
    for least in (0, 64, 99):
        load = Concurrency(64, least)
        assert not load.adapts
        assert load.look([EASY | {"kv_usage": 1.0, "waiting": 99.0}], 64) == 64


def test_it_starts_low_and_rises_while_the_limit_is_reached() -> None:
    load = Concurrency(64, 8)
    assert load.limit == 8
    assert load.look([EASY], 7) == 8, "there is room already"
    seen = [load.look([EASY], load.limit) for _ in range(40)]
    assert seen == sorted(seen) and seen[0] == 9 and seen[-1] == 64


def test_full_memory_lowers_it_to_the_lower_bound() -> None:
    load = Concurrency(64, 8)
    load.limit = 64
    assert load.look([EASY, EASY | {"kv_usage": 0.91}], 64) == 56
    for _ in range(40):
        load.look([EASY | {"kv_usage": 0.99}], 64)
    assert load.limit == 8


def test_between_easy_and_full_it_stays() -> None:
    load = Concurrency(64, 8)
    assert load.look([EASY | {"kv_usage": 0.8}], 8) == 8
    assert load.look([EASY | {"waiting": 1.0}], 8) == 8


def test_rows_that_lost_their_place_lower_it_once() -> None:
    load = Concurrency(64, 8)
    load.limit = 64
    assert load.look([EASY | {"kv_usage": 0.8}], 64) == 64, "what was before the first look does not count"
    assert load.look([EASY | {"kv_usage": 0.8, "preempted": 4.0}], 64) == 56
    assert load.look([EASY | {"kv_usage": 0.8, "preempted": 4.0}], 64) == 56


def test_a_queue_counts_when_it_stays() -> None:
    load = Concurrency(64, 8)
    load.limit = 64
    queue = EASY | {"waiting": 3.0}
    assert [load.look([each], 64) for each in (queue, EASY | {"waiting": 1.0}, queue)] == [64, 64, 64]
    assert load.look([queue], 64) == 56
    behind_a_server = EASY | {"server_waiting": 3.0}
    assert [load.look([behind_a_server], 56) for _ in range(2)][-1] < 56


@given(st.lists(st.tuples(stats, st.integers(0, 80)), max_size=60), st.integers(1, 64))
def test_it_never_leaves_its_bounds(looks: list[tuple[dict[str, float], int]], least: int) -> None:
    load = Concurrency(64, least)
    for engine, in_play in looks:
        assert least <= load.look([engine], in_play) <= 64
