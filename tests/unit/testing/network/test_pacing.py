"""Bandwidth and delay by the books: a clock of our own, no sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import LaunchError
from astraflow.testing.network.pacing import BURST_S, Bucket, Conditions, piece_bytes


@given(
    st.lists(st.tuples(st.integers(1, 1 << 16), st.floats(0.0, 0.5)), min_size=1, max_size=50),
    st.floats(1e3, 1e9),
)
def test_no_more_leaves_than_the_line_carries(sends: list[tuple[int, float]], rate: float) -> None:
    line, now, total, last = Bucket(rate), 0.0, 0, 0.0
    for num_bytes, pause_s in sends:
        now += pause_s
        total += num_bytes
        leaves = line.reserve(num_bytes, now)
        assert leaves >= max(last, now), "bytes overtake each other or leave before they came"
        last = leaves
        assert 8 * total <= rate * (leaves + BURST_S) * (1 + 1e-9)


def test_a_busy_line_carries_all_that_it_can() -> None:
    line = Bucket(8_000.0)
    assert [line.reserve(500, 0.0) for _ in range(4)] == pytest.approx([0.5 - BURST_S + 0.5 * i for i in range(4)])


def test_a_sender_that_wakes_late_catches_up_but_saves_nothing() -> None:
    line = Bucket(8_000.0)
    line.reserve(1000, 0.0)
    assert line.reserve(1000, 2.0) == pytest.approx(3.0 - BURST_S), "a second without traffic is lost"


def test_two_connections_share_a_line_and_the_rate_may_change() -> None:
    line = Bucket(8_000.0)
    moments = [line.reserve(100, 0.0) for _ in range(20)]  # of two connections in turn
    assert moments[-1] == pytest.approx(2.0 - BURST_S)
    line.bits_per_s = 16_000.0
    assert line.reserve(100, 0.0) == pytest.approx(moments[-1] + 0.05)
    line.bits_per_s = 0.0
    assert line.reserve(1 << 30, 5.0) == 5.0


@pytest.mark.parametrize(("rates", "size"), [((0.0, 0.0), 1 << 16), ((8e3, 0.0), 256), ((0.0, 100e6), 62_500)])
def test_slow_lines_send_small_pieces(rates: tuple[float, ...], size: int) -> None:
    assert piece_bytes(*rates) == size


@pytest.mark.parametrize("wrong", [{"bits_per_s": -1.0}, {"delay_s": float("nan")}, {"window_bytes": 0}])
def test_what_cannot_be_a_link_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(LaunchError, match=f"link.{next(iter(wrong))}"):
        Conditions(**wrong)  # type: ignore[arg-type]
