"""Data-parallel ranks over HTTP: shares of one batch, one acknowledgement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.testing.dataflow import episode, small_config

Serve = Callable[..., Any]


def play(client: DataflowClient, version: int) -> None:
    leases = client.lease("n", 4).leases
    client.commit([episode(x, "n", float(int(x.episode_id[-1]) % 2), version) for x in leases])


def test_each_rank_gets_its_share_and_one_acknowledgement_is_enough(serve: Serve) -> None:
    client = serve(small_config()).start()
    play(client, 0)
    whole = client.batch("actor", "t", 0, wait_s=5)
    shares = [client.batch("actor", "t", 0, wait_s=5, rank=r, ranks=3) for r in range(3)]
    assert whole is not None
    got = [s for s in shares if s is not None]
    assert [(h.rank, h.ranks) for h, _ in got] == [(0, 3), (1, 3), (2, 3)]
    for header, _ in got:
        assert (header.num_groups, header.num_episodes, header.num_rows, header.num_sampled_tokens) == (2, 4, 4, 12)
        assert header.metrics == whole[0].metrics
    rows = pa.concat_tables([t for _, t in got]).sort_by("episode_id")
    assert rows.equals(whole[1].sort_by("episode_id"))
    assert sorted(t.num_rows for _, t in got) == [1, 1, 2]
    client.ack(got[0][0], "t")
    assert client.status()["policies"]["actor"]["version"] == 1


def test_a_rank_that_asks_before_rank_0_acknowledged_waits_for_it(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    play(client, 0)
    first = client.batch("actor", "t", 0, wait_s=5, rank=0, ranks=2)
    play(client, 0)
    answers: list[Any] = []
    other = service.client()
    asking = threading.Thread(target=lambda: answers.append(other.batch("actor", "t", 1, wait_s=20, rank=1, ranks=2)))
    asking.start()
    assert client.batch("actor", "t", 1, wait_s=0.2, rank=1, ranks=2) is None
    with pytest.raises(WireError, match="is not acknowledged"):
        client.batch("actor", "t", 1, rank=0, ranks=2)
    assert first is not None
    client.ack(first[0], "t")
    asking.join(60)
    assert answers[0] is not None and answers[0][0].step == 2


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_cannot_be_is_refused(serve: Serve, rank: int, ranks: int) -> None:
    client = serve(small_config()).start()
    with pytest.raises(WireError, match="number ranks from 0") as caught:
        client.batch("actor", "t", 0, rank=rank, ranks=ranks)
    assert caught.value.status == 422
