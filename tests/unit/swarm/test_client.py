"""The client that scripts and notebooks use, against a real door."""

from __future__ import annotations

import http.client
import json
import logging
import math
import threading
from contextlib import closing

import numpy as np
import pytest

from astraflow import swarm as room
from astraflow.errors import EpisodeError, Unauthorized, Unreachable, WireError
from astraflow.swarm import Lost, RunOver, Swarm
from astraflow.testing.faults.flaky_proxy import FlakyProxy
from astraflow.types import Outcome
from swarm_door import DoorBench, lease


@pytest.fixture
def bench():
    with DoorBench([lease(n) for n in range(4)]) as opened:
        yield opened


@pytest.fixture
def swarm(bench):
    with Swarm(bench.url, name="s", code="v1") as opened:
        yield opened


def call(play, model="actor"):
    """As an agent that knows the two strings only."""
    host, _, path = play.base_url.removeprefix("http://").partition("/")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "1+1=?"}]})
    head = {"content-type": "application/json", "authorization": f"Bearer {play.api_key}"}
    with closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        connection.request("POST", f"/{path}/chat/completions", body, head)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def test_at_most_ten_public_names():
    assert len(room.__all__) <= 10
    assert sorted(n for n in vars(Swarm) if not n.startswith("_")) == ["close", "code", "lease", "leases", "plays"]


def test_plays_until_the_run_is_over(bench, swarm):
    rewards, end = [], threading.Thread(target=bench.say_over)
    for play in swarm.plays():
        with play:
            assert call(play)[1]["choices"][0]["message"]["content"] == "2"
            assert play.finish(np.float32(0.5)) is None
        rewards.append(play.task.row)
        if len(rewards) == 4:
            end.start()
    end.join(60)
    assert rewards == [0, 1, 2, 3]
    assert [(e.error, e.code, e.trajectories[0].reward) for e in bench.episodes] == [(None, "v1", 0.5)] * 4
    with pytest.raises(RunOver):
        swarm.lease()


@pytest.mark.parametrize("reward", [math.nan, math.inf, "good", [1.0], {"actor": "x"}, {"actor": math.nan}])
def test_a_reward_that_is_none_is_refused_before_it_is_sent(bench, swarm, reward):
    play = swarm.lease()
    call(play)
    with pytest.raises(EpisodeError, match="reward"):
        play.finish(reward)
    assert not play.over and not bench.episodes
    assert play.finish(1.0) is None


def test_rewards_of_every_form_arrive(bench, swarm):
    given = [{"actor": 1, "critic": 0.5}, None, Outcome(reward=0.25, metrics={"success": 1.0}), 1]
    for reward in given:
        play = swarm.lease()
        call(play), call(play, "critic")
        play.finish(reward, code="v2")
    found = [{t.policy: t.reward for t in e.trajectories} for e in bench.episodes]
    assert found == [
        {"actor": 1.0, "critic": 0.5}, {"actor": None, "critic": None}, {"actor": 0.25, "critic": 0.25},
        {"actor": 1.0, "critic": 1.0},
    ]  # fmt: skip
    assert bench.episodes[2].metrics == {"success": 1.0} and bench.episodes[0].code == "v2"


def test_rewards_per_call_arrive(bench, swarm):
    play = swarm.lease()
    call(play), call(play)
    play.finish(None, rewards_per_call={"actor": [0.0, 1.0]})
    assert bench.episodes[0].trajectories[0].rewards_per_call == (0.0, 1.0)


def test_a_reward_for_an_unknown_policy_is_refused_and_the_episode_goes_on(swarm):
    play = swarm.lease()
    call(play)
    with pytest.raises(WireError, match="known: actor, critic"):
        play.finish({"writer": 1.0})
    assert play.finish({"actor": 1.0}) is None


def test_an_exception_inside_is_the_error_of_the_episode(bench, swarm, caplog):
    with swarm.lease():
        raise KeyError("boom")
    with swarm.lease():
        pass
    with swarm.lease():
        raise EpisodeError("sandbox: it is full")
    assert [e.error for e in bench.episodes] == [
        "workflow: KeyError: 'boom'", "reward: the block ended without one; call play.finish", "sandbox: it is full",
    ]  # fmt: skip
    assert "boom" in caplog.text


def test_ctrl_c_gives_the_episode_back(bench, swarm):
    with pytest.raises(KeyboardInterrupt), swarm.lease() as play:
        raise KeyboardInterrupt
    bench.wait_for(lambda: bench.returned == [(play.episode_id, 1, False)])
    assert not bench.episodes


def test_close_gives_back_what_is_open(bench):
    with Swarm(bench.url) as swarm:
        plays = swarm.leases(3)
        assert len(plays) == 3
    bench.wait_for(lambda: len(bench.returned) == 3)


def test_heartbeats_keep_an_episode_and_cancel_it():
    with DoorBench([lease(0)], dead_after_s=1.5) as bench, Swarm(bench.url) as swarm:
        play = swarm.lease()
        threading.Event().wait(2.5)
        assert not play.cancelled and not bench.returned
        bench.call(lambda: bench.swarm.runner.cancel([(play.episode_id, 1)]))
        bench.wait_for(lambda: play.cancelled)
        bench.wait_for(lambda: swarm._door.plays == [])  # heartbeats name it no more
        with pytest.raises(Lost, match="cancelled by the run"):
            play.finish(1.0)


def test_a_restart_of_the_node_is_waited_for_and_costs_what_was_open(bench, swarm):
    first = swarm.lease()
    bench.restart()
    with pytest.raises(Lost, match="may have started again"):
        first.finish(1.0)
    rest = [swarm.lease() for _ in range(4)]
    assert {(p.episode_id, p.attempt) for p in rest} >= {(first.episode_id, 2)}
    call(rest[0])
    assert rest[0].finish(1.0) is None


def test_a_door_that_stays_away_is_given_up_by_name(bench, caplog):
    caplog.set_level(logging.WARNING)
    with Swarm(bench.url, give_up_s=2.5) as swarm:
        bench.close()
        with pytest.raises(Unreachable, match="given up after"):
            swarm.lease()
    assert "waits for the swarm door, up to" in caplog.text


def test_a_wrong_token_is_said_at_once():
    with DoorBench(token="right") as bench, Swarm(bench.url, "wrong") as swarm, pytest.raises(Unauthorized):
        swarm.lease()


def test_through_a_bad_network_nothing_is_kept_twice_and_nothing_is_lost():
    with DoorBench([lease(n) for n in range(30)], dead_after_s=0.5) as bench:
        with FlakyProxy(bench.url, 3, rate=0.3) as proxy, Swarm(proxy.url) as swarm:
            while len(bench.episodes) < 30:
                play = swarm.lease(1.0)
                if play is None:
                    continue
                with play:
                    if answered(play):
                        play.finish(1.0)
                    else:
                        play.abort()
        assert proxy.counts.total() > 5
    done = [e.episode_id for e in bench.episodes]
    assert len(done) == len(set(done)) == 30


def answered(play):
    """Agents of their own have retries of their own: here, none."""
    try:
        return call(play)[0] == 200
    except (OSError, http.client.HTTPException):
        return False
