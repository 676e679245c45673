"""What is refused at the door of a running service, and that it is counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import urllib3
from msgspec.structs import replace

from astraflow.errors import JournalError, WireError
from astraflow.testing.dataflow import episode, small_config, trajectory
from astraflow.testing.stages import EchoStage
from astraflow.wire import messages as m
from astraflow.wire.messages import PROTOCOL_HEADER

Serve = Callable[..., Any]
ACK = m.Ack(trainer_id="t", version=7)


def refused(status: int, call: Callable[[], Any], problem: str | None = None) -> None:
    with pytest.raises(WireError, match=problem) as caught:
        call()
    assert caught.value.status == status


def test_versions_that_do_not_exist_are_422_and_counted(serve: Serve) -> None:
    client = serve(small_config()).start()
    leases = client.lease("n", 4).leases
    refused(
        422, lambda: client.commit([episode(x, "n", 1.0, 1) for x in leases]), "column versions=1 must be at most 0"
    )
    assert client.status()["refused"] == {"column_versions": 1}
    assert set(client.commit([episode(x, "n", float(x.episode_id[-1]), 0) for x in leases]).values()) == {"accepted"}
    assert client.batch("actor", "t", 0, wait_s=5) is not None
    (lease,) = client.lease("n", 1).leases
    assert set(client.commit([episode(lease, "n", 1.0, 1)]).values()) == {"accepted"}  # step 1 may be published by now


def test_an_episode_of_too_many_tokens_is_422_and_counted(serve: Serve) -> None:
    client = serve(small_config(dataflow={"max_episode_tokens": 8})).start()
    first, second = client.lease("n", 2).leases
    rows = [trajectory(1.0, tokens=4), replace(trajectory(1.0, tokens=3, branch=1), fork_at=2)]
    made = [episode(first, "n"), episode(second, "n", trajectories=rows)]
    problem = rf"episode.tokens=9 must be at most 8, .* \({second.episode_id}, row 1\); .*dataflow.max_episode_tokens"
    refused(422, lambda: client.commit(made), problem)
    assert client.status()["refused"] == {"overlong": 1}
    made[1] = episode(second, "n", trajectories=[trajectory(1.0, tokens=8)])
    assert set(client.commit(made).values()) == {"accepted"}


def test_rows_of_another_task_and_attempt_are_422_and_counted(serve: Serve) -> None:
    client = serve(small_config()).start()
    (lease,) = client.lease("n", 1).leases
    other = replace(lease, task=replace(lease.task, row=99))
    refused(422, lambda: client.commit([episode(other, "n")]), "column row=99 must be that of its lease")
    assert client.status()["refused"] == {"column_row": 1}
    assert set(client.commit([episode(lease, "n")]).values()) == {"accepted"}


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 1), (1, 1), (0, 0), (0, 1025), (3, 10**7)])
def test_ranks_are_counted_from_0_and_not_without_end(serve: Serve, rank: int, ranks: int) -> None:
    client = serve(small_config()).start()
    problem = rf"rank={rank} must be >= 0 and below ranks={ranks}, at most 1024"
    refused(422, lambda: client.batch("actor", "t", 0, rank=rank, ranks=ranks), problem)
    assert client.batch("actor", "t", 0, rank=1023, ranks=1024) is None


def test_json_of_another_type_and_requests_without_the_protocol_are_refused_and_counted(serve: Serve) -> None:
    service = serve(small_config())
    client, body = service.start(), b'{"trainer_id":"t","version":0}'
    for headers, status in (({PROTOCOL_HEADER: "1"}, 415), ({"content-type": "application/json"}, 426)):
        answer = urllib3.request("POST", service.url + "/policies/actor/batches", body=body, headers=headers)
        assert answer.status == status
    assert urllib3.request("DELETE", service.url + "/nodes/n").status == 426
    assert client.status()["refused"] == {"content_type": 1, "protocol": 2}
    for path in ("/status", "/metrics", "/run"):  # people and Prometheus ask without it
        assert urllib3.request("GET", service.url + path).status == 200


def test_what_the_run_does_not_have_and_a_full_disk_are_counted_by_reason(serve: Serve) -> None:
    service = serve(small_config(consumers={"log": {}}))
    client, short = service.start(), service.client(give_up_s=0.0)
    resume = m.Resume(trainer_id="x", version=0, urls=(), run_id="other")
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("unknown_stage", 404, lambda: client.stage_lease("none", "w", 1)),
        ("unknown_policy", 404, lambda: client.batch("critic", "t", 0)),
        ("unknown_consumer", 404, lambda: client.consume("none", "actor")),
        ("unknown_node", 404, lambda: client.lease("stranger", 1)),
        ("unknown_policy", 404, lambda: client.consume("log", "critic")),
        ("unknown_batch", 404, lambda: client._http.json("POST", "/policies/actor/batches/actor/7/ack", ACK, m.Ok)),
        ("other_run", 409, lambda: client.resume("actor", resume)),
        ("no_room", 507, lambda: short.join(m.Join(node_id="x", name="x", capacity=1, run_id=client.run().run_id))),
    ]
    append = service.shell.journal.append

    def full(entries: Any) -> None:
        raise JournalError("journal", "x", "cannot be written", "make room")

    expected: Counter[str] = Counter()
    for reason, status, call in calls:
        service.shell.journal.append = full if reason == "no_room" else append
        refused(status, call)
        expected[reason] += 1
        assert client.status()["refused"] == expected, reason
    service.shell.journal.append = append
    refused(409, lambda: client.checkpoint("actor", "t", 4), "newer than the acknowledged version")
    assert client.status()["refused"] == expected, "what the state of the run is against is no fault"


@pytest.mark.parametrize(
    "call",
    [
        lambda client, run, name: client.join(m.Join(node_id=name, name="x", capacity=1, run_id=run)),
        lambda client, run, name: client.join(m.Join(node_id="x", name=name, capacity=1, run_id=run)),
        lambda client, run, name: client.lease("n", 1, request_id=name),
        lambda client, run, name: client.resume("actor", m.Resume(trainer_id=name, version=0, urls=(), run_id=run)),
        lambda client, run, name: client.stage_lease("s", name, 1),
    ],
)
def test_ids_have_a_length(serve: Serve, call: Callable[[Any, str, str], Any]) -> None:
    stage = {"type": "astraflow.testing.stages:EchoStage", "workers": 0}
    client = serve(small_config(stages={"s": stage})).start()
    run = client.run().run_id
    refused(422, lambda: call(client, run, "x" * 257), "Expected `str` of length <= 256")
    call(client, run, "x" * 256)
    assert client.status()["refused"] == {"malformed": 1}


def test_episode_ids_have_a_length_and_what_went_wrong_is_cut(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    (lease,) = client.lease("n", 1).leases
    long = replace(lease, episode_id="train/0/1/" + "9" * 300)
    refused(422, lambda: client.commit([episode(long, "n")]), "Expected `str` of length <= 256")
    assert client.status()["refused"] == {"header": 1}
    assert client.commit([episode(lease, "n", error="workflow: " + "x" * 10**6)]) == {lease.episode_id: "accepted"}
    group = service.call(lambda: service.shell.machine.state.groups[lease.group_id])
    assert [len(result.error) for result in group.results if result is not None] == [4096]


def test_what_went_wrong_in_a_stage_is_cut(serve: Serve) -> None:
    stage = {"type": "astraflow.testing.stages:EchoStage", "workers": 0}
    client = serve(small_config(stages={"s": stage})).start()
    client.commit([episode(x, "n", float(x.episode_id[-1])) for x in client.lease("n", 2).leases])
    rows, table = client.stage_lease("s", "w", 1)
    (leased,) = rows.leases
    failed = [(leased.entry_id, 1, "x" * 10**6)]
    header = m.ColumnsHeader(worker_id="w", request_id="r", leases=[], row_ids=[], failed=failed)
    answers = client.stage_columns("s", header, EchoStage().run(table.slice(0, 0)))
    assert answers == {leased.entry_id: "refused: " + "x" * 4096}


_HEADERS = {"content-type": "application/json", PROTOCOL_HEADER: "1"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/leases", {"node_id": "n", "request_id": "", "n": 1}),
        ("/stages/echo/leases", {"worker_id": "w", "request_id": "", "n": 1}),
        ("/policies/actor/resume", {"trainer_id": "", "version": 0, "urls": []}),
        ("/nodes", {"node_id": "", "name": "n", "capacity": 1}),
        ("/relays/" + "x" * 257, {"url": "http://h:1"}),
    ],
)
def test_ids_are_neither_empty_nor_endless(serve: Serve, path: str, body: dict[str, Any]) -> None:
    service = serve(
        small_config(stages={"echo": {"type": "astraflow.testing.stages:EchoStage", "policies": ["actor"]}})
    )
    client = service.start()
    answer = urllib3.request("POST", service.url + path, json={**body, "run_id": client.run().run_id}, headers=_HEADERS)
    assert answer.status == 422 and client.status()["refused"] == {"malformed": 1}


@pytest.mark.parametrize("path", ["/nodes/", "/stages/echo/workers/"])
def test_what_leaves_has_an_id_too(serve: Serve, path: str) -> None:
    service = serve(
        small_config(stages={"echo": {"type": "astraflow.testing.stages:EchoStage", "policies": ["actor"]}})
    )
    client = service.start()
    before = client.status()["journal"]["command"]
    assert urllib3.request("DELETE", service.url + path + "x" * 257, headers=_HEADERS).status == 422
    assert client.status()["journal"]["command"] == before
    assert urllib3.request("DELETE", service.url + path + "x" * 256, headers=_HEADERS).status == 200


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://[::1", "http://h:99999", "http://h:abc", "http://h:0", " http://h", "http://h\0", "http://a b",
     "ftp://h", "http://", "h:1"],
)  # fmt: skip
def test_relays_say_where_they_are_in_a_way_that_nodes_can_take_apart(serve: Serve, url: str) -> None:
    client = serve(small_config()).start()
    run_id = client.run().run_id
    refused(
        422,
        lambda: client.relay("r", m.Relay(run_id=run_id, url=url)),
        "must be http://host:port by which others reach it",
    )
    assert client.status()["refused"] == {"malformed": 1}
    client.relay("r", m.Relay(run_id=run_id, url="http://[::1]:80/"))
    assert client.lease("n", 0).versions["actor"].urls == ("file:///w", "http://[::1]:80/weights/actor")


@pytest.mark.parametrize("url", ["http://[", "http://h:99999", "nowhere"])
def test_trainers_say_where_weights_are_in_a_way_that_nodes_can_take_apart(serve: Serve, url: str) -> None:
    client = serve(small_config()).start()
    resume = m.Resume(trainer_id="u", version=0, urls=("file:///w", url), run_id=client.run().run_id)
    refused(422, lambda: client.resume("actor", resume), "must be the URL of a weight store")
    refused(422, lambda: client.trainer_heartbeat("actor", "t", {}, {url: 0}), "must be the URL of a weight store")
    assert client.status()["refused"] == {"malformed": 2}
