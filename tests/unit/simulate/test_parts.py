"""The clock, shared processors, lines, engines and drawn episodes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astraflow.errors import Problem
from astraflow.simulate.clock import Clock, Fifo, Host, Line
from astraflow.simulate.engine import Engine
from astraflow.simulate.episodes import Episodes
from astraflow.simulate.profile import Call, EngineCost, EpisodeShape


class Times:
    """When what happened."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.at: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.at[name] = self.clock.now

    def until(self, count: int) -> dict[str, float]:
        self.clock.run(lambda: len(self.at) == count)
        return self.at


def test_equal_times_keep_their_order() -> None:
    times, order = Times(), []
    for name in "abc":
        times.clock.after(1.0, lambda name=name: order.append(name))
    times.clock.run(lambda: len(order) == 3)
    assert order == ["a", "b", "c"] and times.clock.now == 1.0


def test_a_clock_without_events_says_so() -> None:
    with pytest.raises(Problem, match="must come to the next step"):
        Clock().run(lambda: False)


def test_works_share_a_core() -> None:
    times = Times()
    host = Host(times.clock, cores=1)
    host.start(1.0, lambda: times.mark("first"))
    times.clock.after(0.5, lambda: host.start(1.0, lambda: times.mark("second")) and None)
    assert times.until(2) == {"first": pytest.approx(1.5), "second": pytest.approx(2.0)}


def test_two_cores_serve_two_works() -> None:
    times = Times()
    host = Host(times.clock, cores=2)
    for name in "ab":
        host.start(1.0, lambda name=name: times.mark(name))
    assert times.until(2) == {"a": 1.0, "b": 1.0}


def test_a_serial_server_takes_one_after_the_other() -> None:
    times = Times()
    server = Fifo(Host(times.clock))
    for name in "ab":
        server.add(1.0, lambda name=name: times.mark(name))
    assert times.until(2) == {"a": 1.0, "b": 2.0}


def test_bytes_wait_for_those_before() -> None:
    line = Line(Clock(), mbit=8e-6)  # a byte a second
    assert (line.send(2.0), line.send(3.0)) == (2.0, 5.0)
    assert (line.num_bytes, line.num_messages) == (5.0, 2)


def engine_of(times: Times, rows: int = 8, **cost: float) -> Engine:
    engine = Engine(times.clock, Host(times.clock), EngineCost(**cost), rows)  # type: ignore[arg-type]
    engine.versions = {"a": 0}
    return engine


def test_a_decode_step_costs_by_its_rows() -> None:
    times = Times()
    engine = engine_of(times, step_s=1.0, row_s=0.5)
    engine.submit("a", 2, 0, lambda version: times.mark("short"))
    engine.submit("a", 5, 0, lambda version: times.mark("long"))
    assert times.until(2) == {"short": 2 * 2.0, "long": 2 * 2.0 + 3 * 1.5}
    assert (engine.num_steps, engine.num_tokens) == (5, 7)
    assert engine.busy_s() == pytest.approx(8.5)


def test_a_call_joins_at_the_end_of_a_step() -> None:
    times = Times()
    engine = engine_of(times, step_s=1.0, prefill_token_s=0.25)
    engine.submit("a", 4, 0, lambda version: times.mark("first"))
    times.clock.after(1.5, lambda: engine.submit("a", 1, 2, lambda version: times.mark("second")))
    # the step ends at 2, two tokens of the prompt are read until 2.5
    assert times.until(2) == {"second": 3.5, "first": 4.5}


def test_a_full_engine_lets_calls_wait() -> None:
    times = Times()
    engine = engine_of(times, rows=1, step_s=1.0)
    for name in "ab":
        engine.submit("a", 2, 0, lambda version, name=name: times.mark(name))
    assert times.until(2) == {"a": 2.0, "b": 4.0}


def test_a_swap_pauses_decoding_and_a_call_keeps_its_oldest_version() -> None:
    times, versions = Times(), []
    engine = engine_of(times, step_s=1.0, swap_s=0.5)
    engine.submit("a", 3, 0, lambda version: versions.append(version) or times.mark("call"))
    times.clock.after(1.2, lambda: engine.swap("a", 1, lambda: times.mark("swap")))
    assert times.until(2) == {"swap": 2.5, "call": 3.5}
    assert versions == [0] and engine.versions == {"a": 1}


def test_a_burst_joins_together() -> None:
    times = Times()
    engine = engine_of(times, step_s=1.0, gather_s=0.02)
    engine.submit("a", 1, 0, lambda version: times.mark("first"))
    times.clock.after(0.0005, lambda: engine.submit("a", 1, 0, lambda version: times.mark("second")))
    at = times.until(2)
    assert at["first"] == at["second"] == pytest.approx(1.002)


def test_lengths_keep_their_mean_and_their_limit() -> None:
    shape = EpisodeShape(calls=[Call(policy="a", tokens=40.5, spread=0.8)], rounds=1.25)
    episodes = Episodes(shape, {"a": 400}, group_size=4, seed=1)
    drawn = [episodes.of(group, k) for group in range(500) for k in range(4)]
    tokens = np.array([call.tokens for calls in drawn for call in calls])
    assert np.mean([len(calls) for calls in drawn]) == pytest.approx(1.25, abs=0.03)
    assert tokens.mean() == pytest.approx(40.5, rel=0.05) and tokens.max() <= 400
    assert np.log(tokens).std() == pytest.approx(0.8, abs=0.06)
    assert math.isclose(np.median(tokens), 40.5 * math.exp(-0.32), rel_tol=0.07)
    again = Episodes(shape, {"a": 400}, group_size=4, seed=1)
    assert again.of(7, 2) == episodes.of(7, 2)
