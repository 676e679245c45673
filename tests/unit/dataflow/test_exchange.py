"""A commit that asks for the next leases, through the real client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.dataflow.machine import commands as c
from astraflow.testing.dataflow import episode, policy_section, small_config
from astraflow.types import EpisodeLease
from astraflow.wire import messages as m


def ids(leases: list[EpisodeLease]) -> list[str]:
    return [lease.episode_id for lease in leases]


def test_a_commit_brings_the_next_leases_in_one_transaction(serve: Any) -> None:
    service = serve(small_config())
    client = service.start()
    first = client.lease("n", 2).leases
    before = client.status()["journal"]["command"]
    reply = client.exchange([episode(x, "n") for x in first], None, m.NextLeases("r", 2))
    assert set(reply.results.values()) == {"accepted"} and not reply.finished
    assert len(reply.leases) == 2 and not set(ids(reply.leases)) & set(ids(first))
    assert reply.versions["actor"].version == 0
    assert client.status()["journal"]["command"] == before + 2
    assert service.call(lambda: service.shell.machine.state.nodes["n"].held).keys() == set(ids(reply.leases))


def test_a_commit_that_is_sent_again_gets_the_same_leases(serve: Any) -> None:
    client = serve(small_config()).start()
    done = [episode(x, "n") for x in client.lease("n", 2).leases]
    once, again = (client.exchange(done, None, m.NextLeases("r", 2)) for _ in range(2))
    assert set(once.results.values()) == {"accepted"} and set(again.results.values()) == {"duplicate"}
    assert ids(once.leases) == ids(again.leases) and len(once.leases) == 2


def test_the_same_leases_also_after_a_restart(serve: Any) -> None:
    service = serve(small_config())
    client = service.start()
    done = [episode(x, "n") for x in client.lease("n", 2).leases]
    once = client.exchange(done, None, m.NextLeases("r", 2))
    service.close()
    again = serve(small_config()).client().exchange(done, None, m.NextLeases("r", 2))
    assert set(again.results.values()) == {"duplicate"} and ids(once.leases) == ids(again.leases)


def test_a_closed_gate_gives_no_leases_and_keeps_nobody_waiting(serve: Any) -> None:
    service = serve(small_config(policies__actor=policy_section(2, 0)))
    client = service.start()
    played = client.lease("n", 8).leases
    before = client.status()["journal"]["command"]
    reply = client.exchange([episode(x, "n") for x in played], None, m.NextLeases("r", 8))
    assert set(reply.results.values()) == {"accepted"} and reply.leases == []
    assert client.status()["journal"]["command"] == before + 1


@pytest.mark.parametrize("more", [None, m.NextLeases("r", 0), m.NextLeases("r", -1)])
def test_who_asks_for_none_gets_none(serve: Any, more: m.NextLeases | None) -> None:
    client = serve(small_config()).start()
    reply = client.exchange([episode(x, "n") for x in client.lease("n", 1).leases], None, more)
    assert set(reply.results.values()) == {"accepted"} and reply.leases == []
    assert bool(reply.versions) == (more is not None)


def test_a_node_that_is_not_in_the_pool_hears_what_became_of_its_episodes(serve: Any) -> None:
    service = serve(small_config())
    client = service.start()
    played = client.lease("n", 2).leases
    client.drain("n")
    reply = client.exchange([episode(x, "n") for x in played], None, m.NextLeases("r", 2))
    assert all(result.startswith("refused") for result in reply.results.values()) and reply.leases == []


def test_a_node_that_leaves_in_the_same_turn_gets_the_answer_to_its_commit(serve: Any) -> None:
    service = serve(small_config())
    client = service.start()
    client.lease("n", 2)
    commands = [c.DrainNode("n"), c.CommitEpisodes("n", None, []), c.LeaseEpisodes("n", "r", 1)]
    at_once = asyncio.run_coroutine_threadsafe(service.shell.submit_all(commands), service._loop)
    drained, committed, leased = at_once.result(60)
    assert drained is None and committed == {} and leased.status == 404


def test_the_end_of_the_run_is_told(serve: Any) -> None:
    client = serve(small_config(run__steps=1, policies__actor=policy_section(1, 0))).start()
    played = [episode(x, "n", float(i)) for i, x in enumerate(client.lease("n", 2).leases)]
    client.commit(played)
    got = client.batch("actor", "t", 0, wait_s=5)
    assert got is not None
    client.ack(got[0], "t")
    assert client.exchange(played, None, m.NextLeases("r", 2)).finished
