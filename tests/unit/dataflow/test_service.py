"""The service over HTTP through the real client, with real episodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import urllib3

from astraflow.dataflow.machine import commands as c
from astraflow.errors import DataflowError, Unauthorized, WireError
from astraflow.testing.dataflow import Rows, episode, policy_section, small_config, trajectory
from astraflow.wire import messages as m
from astraflow.wire.codec import CONTENT_TYPE, TRAINING_SCHEMA, check_schema, stream_pieces, write_stream
from astraflow.wire.episodes import encode_episodes
from service_steps import play, reward_of, status_of, step

Serve = Callable[..., Any]
ARROW = {"content-type": CONTENT_TYPE, m.PROTOCOL_HEADER: str(m.PROTOCOL)}


def test_a_heartbeat_is_told_what_the_node_plays_in_vain_also_after_a_restart(serve: Any) -> None:
    service = serve(small_config())
    client = service.start()
    first, second = client.lease("n", 2).leases
    playing = [(first.episode_id, 1), (second.episode_id, 1)]
    assert client.heartbeat("n", {}, {}, playing).cancelled == []
    service.submit(c.Expire(leases=playing[:1]))
    service.close()
    client = serve(small_config()).client()
    assert client.heartbeat("n", {}, {}, playing).cancelled == playing[:1]  # suppose that this reply is lost
    assert client.heartbeat("n", {}, {}, playing).cancelled == playing[:1]
    assert client.heartbeat("n", {}, {}, playing[1:]).cancelled == []


def test_a_node_that_computes_with_other_weights_is_named_once(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = serve(small_config()).start()
    for wrong in (0.0, 1.0, 1.0):
        client.heartbeat("n", {"weights_wrong": wrong}, {"actor": 3})
    named = [record.getMessage() for record in caplog.records if "other weights" in record.getMessage()]
    assert named == ["node n computes with other weights than it says ({'actor': 3}); see its log"]


def test_a_run_from_the_first_lease_to_the_end(serve: Serve, tmp_path: Path) -> None:
    service = serve(small_config(run__steps=3, evaluation={"source": "held", "every": 2}))
    client = service.start()
    seen: list[str] = []
    for version in range(3):
        while client.status()["policies"]["actor"]["queue"] < 2:
            play(client, 8, version)
        seen += step(client, version, loss=0.5)
        client.checkpoint("actor", "t", version + 1)
    while not client.run().finished:
        play(client, 8, 3)
    assert len(seen) == len(set(seen)) == 12
    status = client.status()
    assert status["finished"] and status["accounting"] == {"admitted": 6, "trained": 6, "dropped": {}, "in_flight": 0}
    assert client.lease("n", 1, wait_s=30).finished
    assert client.heartbeat("n", {}, {}).finished
    assert status_of(lambda: client.batch("actor", "t", 3)) == 410
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if r["kind"] == "step"]
    assert [r["step"] for r in steps] == [1, 2, 3] and all(r["loss"] == 0.5 for r in steps)
    assert [r["step"] for r in rows if r["kind"] == "eval"] == [0, 2, 3]
    assert all(r["reward/mean"] == 0.5 and r["staleness/max"] <= 1 and r["time_s"] >= 0 for r in steps)


def test_a_batch_carries_the_exact_tokens_with_advantages(serve: Serve) -> None:
    client = serve(small_config(policies__actor=policy_section(1, 0))).start()
    leases = client.lease("n", 2).leases
    first = episode(leases[0], "n", trajectories=[trajectory(1.0, marker=40), trajectory(1.0, branch=1, marker=60)])
    client.commit([first])
    client.commit([episode(leases[1], "n", trajectories=[trajectory(0.0, marker=80)])])
    got = client.batch("actor", "t", 0)
    assert got is not None
    header, table = got
    check_schema(table, TRAINING_SCHEMA)
    assert (header.batch_id, header.step, header.num_groups, header.num_episodes) == ("actor/1", 1, 1, 2)
    assert [x[0] for x in table.column("token_ids").to_pylist()] == [40, 60, 80]
    advantages = table.column("advantages").to_pylist()
    assert [round(a[1], 4) for a in advantages] == [1.0, 1.0, -1.0] and all(a[0] == 0.0 for a in advantages)
    assert not header.replay and header.metrics["reward/mean"] == 0.5


def test_a_waiting_batch_request_is_answered_by_the_commit_that_fills_it(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(service.client().batch, "actor", "t", 0, wait_s=20)
        play(client, 4)
        got = waiting.result(60)
    assert got is not None and got[0].step == 1


def test_a_waiting_lease_request_is_answered_by_the_acknowledgement_that_opens_the_gate(serve: Serve) -> None:
    service = serve(small_config(policies__actor=policy_section(2, 0)))
    client = service.start()
    play(client, 8)
    assert client.lease("n", 1, wait_s=0.01).leases == []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(service.client().lease, "n", 8, wait_s=20)
        step(client, 0)
        leases = waiting.result(60).leases
    assert len(leases) == 4


def test_a_batch_that_is_not_full_is_nothing(serve: Serve) -> None:
    client = serve(small_config()).start()
    assert client.batch("actor", "t", 0, wait_s=0.01) is None


def test_commits_are_idempotent_and_late_ones_refused(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    leases = client.lease("n", 2).leases
    episodes = [episode(x, "n") for x in leases]
    assert set(client.commit(episodes).values()) == {"accepted"}
    assert set(client.commit(episodes).values()) == {"duplicate"}
    (lease,) = client.lease("n", 1).leases
    client.drain("n")
    assert client.commit([episode(lease, "n")])[lease.episode_id].startswith("refused: attempt 1 is over")


def test_a_node_that_went_silent_is_gone_and_told_to_join_again(serve: Serve) -> None:
    section = {"dead_after_s": 0.2, "heartbeat_s": 0.05}
    service = serve(small_config(dataflow=section))
    client = service.start("dead")
    lost = client.lease("dead", 2).leases
    client.join(m.Join(node_id="n", name="n", capacity=8, run_id=client.run().run_id))
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(0.05):
            client.heartbeat("n", {}, {})

    thread = threading.Thread(target=live)
    thread.start()
    try:
        service.shell.machine.state.policies["actor"].admitted += 0
        while [node["id"] for node in client.status()["nodes"]] != ["n"]:
            client.lease("n", 0)
        again = client.lease("n", 2, wait_s=10).leases
    finally:
        stop.set()
        thread.join()
    assert [(x.episode_id, x.attempt) for x in again] == [(x.episode_id, 2) for x in lost]
    assert status_of(lambda: client.heartbeat("dead", {}, {})) == 404


def test_wrong_columns_are_422_and_nothing_is_committed(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    (lease,) = client.lease("n", 1).leases
    strange = episode(lease, "n", trajectories=[trajectory(1.0, policy="critic")])
    with pytest.raises(WireError, match="critic is not a policy") as caught:
        client.commit([strange])
    assert caught.value.status == 422
    assert client.status()["episodes"]["committed"] == 0
    header, batch = encode_episodes([episode(lease, "n")], "n")
    body = write_stream(header, batch.drop_columns(["versions"]))
    answer = urllib3.request("POST", service.url + "/episodes", body=body.to_pybytes(), headers=ARROW)
    assert answer.status == 422 and b"versions" in answer.data
    answer = urllib3.request("POST", service.url + "/episodes", body=b"\x80\x04\x95pickle", headers=ARROW)
    assert answer.status == 422


def test_one_commit_is_of_one_node(serve: Serve) -> None:
    client = serve(small_config()).start()
    leases = client.lease("n", 2).leases
    with pytest.raises(DataflowError, match="one per commit"):
        client.commit([episode(leases[0], "n"), episode(leases[1], "m")])
    assert client.commit([]) == {}


def test_a_wrong_token_another_run_and_unknown_names_are_refused(serve: Serve) -> None:
    service = serve(small_config(), token="secret")
    client = service.start()
    with pytest.raises(Unauthorized):
        service.client(token="wrong").status()
    join = m.Join(node_id="x", name="x", capacity=1, run_id="other")
    assert status_of(lambda: client.join(join)) == 409
    resume = m.Resume(trainer_id="x", version=0, urls=(), run_id="other")
    assert status_of(lambda: client.resume("actor", resume)) == 409
    assert status_of(lambda: client.lease("stranger", 1)) == 404
    assert status_of(lambda: client.batch("critic", "t", 0)) == 404
    assert status_of(lambda: client.trainer_heartbeat("actor", "older")) == 409
    client.trainer_heartbeat("actor", "t", {"busy_s": 1.0})
    assert client.status()["policies"]["actor"]["trainer"]["stats"] == {"busy_s": 1.0}


def test_nodes_are_told_of_a_store_that_comes_later_while_it_has_the_newest_version(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    (own,) = client.lease("n", 0).versions["actor"].urls
    client.trainer_heartbeat("actor", "t", stores={"s3://b/actor?objects=1": 0, "s3://c/actor?objects=2": -1})
    assert client.lease("n", 0).versions["actor"].urls == (own, "s3://b/actor?objects=1")
    service.call(lambda: setattr(service.shell.machine.state.policies["actor"], "latest", 1))
    assert client.lease("n", 0).versions["actor"].urls == (own,)
    client.trainer_heartbeat("actor", "t", stores={"s3://b/actor?objects=1": 1})
    told = client.heartbeat("n", {}, {}).versions["actor"]
    assert (told.version, told.urls) == (1, (own, "s3://b/actor?objects=1"))
    many = {f"s3://{i}": 0 for i in range(17)}
    assert status_of(lambda: client.trainer_heartbeat("actor", "t", stores=many)) == 422


def test_nothing_to_train_on_ends_every_wait_with_advice(serve: Serve) -> None:
    service = serve(small_config(policies__actor=policy_section(2, 1, max_dropped_groups=2)))
    client = service.start()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(service.client().batch, "actor", "t", 0, wait_s=30)
        leases = client.lease("n", 4).leases
        client.commit([episode(x, "n", 1.0) for x in leases])
        with pytest.raises(WireError, match="make rewards differ") as caught:
            waiting.result(60)
    assert caught.value.status == 409
    assert status_of(lambda: client.lease("n", 1)) == 409
    assert client.status()["failure"]["kind"] == "NothingToTrainOn"


def test_metrics_and_status_show_the_same_numbers(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    client.heartbeat("n", {"busy_s": 2.0, "sampled_tokens": 10.0}, {"actor": 0})
    leases = client.lease("n", 2).leases
    client.commit([episode(x, "n", 1.0) for x in leases])
    text = urllib3.request("GET", service.url + "/metrics").data.decode()
    assert 'astraflow_groups_dropped_total{policy="actor",reason="zero_variance"} 1.0' in text
    assert 'astraflow_policy_version{policy="actor"} 0.0' in text
    assert 'astraflow_node_stat{name="busy_s",node="n"} 2.0' in text
    status = client.status()
    assert status["policies"]["actor"]["accounting"]["dropped"] == {"zero_variance": 1}
    assert status["nodes"][0]["versions"] == {"actor": 0}
    assert status["policies"]["actor"]["gate"] == {"in_flight": 0, "limit": 4}


def test_status_says_that_rows_of_metrics_wait_for_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(small_config())
    client = service.start()
    with monkeypatch.context() as patch:
        patch.setattr(service.shell.metrics._writer, "append", _full)
        play(client, 4)
        step(client, 0)
        assert client.status()["metrics_rows_waiting"] == 1
    play(client, 4, version=1)
    step(client, 1)
    assert client.status()["metrics_rows_waiting"] == 0


def _full(row: object) -> None:
    raise OSError(28, "No space left on device")


def test_events_are_streamed(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    response = urllib3.PoolManager().request("GET", service.url + "/events", preload_content=False)
    stream = response.stream(64)
    assert next(stream).startswith(b": connected")
    play(client, 4)
    step(client, 0)
    text = b""
    while b"event: step" not in text:
        text += next(stream)
    response.close()


def test_a_request_goes_on_over_as_many_commands_as_the_rows_need(serve: Serve) -> None:
    levels = ["q5000", *(f"q{i}" for i in range(12_000) if i != 5000)]
    curriculum = {"type": "curriculum", "by": "question", "levels": levels}
    config = small_config(sources__train={"type": "sums", "operators": [curriculum]}, run__seed=2)
    service = serve(config, rows={"train": Rows(12_000), "held": Rows(3)})
    client = service.start()
    (lease,) = client.lease("n", 1, wait_s=20).leases
    assert lease.task.row == 5000
    assert client.status()["sources"]["train"]["skipped"]["curriculum"] > 4096, "more than one command looks at"


def test_nothing_to_train_on_is_the_answer_to_everybody(serve: Serve) -> None:
    curriculum = {"type": "curriculum", "by": "question", "levels": ["none", *(f"q{i}" for i in range(10))]}
    slow = {"dataflow__dead_after_s": 60.0}  # nothing else happens that would wake the request
    service = serve(small_config(sources__train={"type": "sums", "operators": [curriculum]}, **slow))
    client = service.start()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.lease, "n", 1, wait_s=30)
        with pytest.raises(WireError, match=r"sources\.train\.operators=curriculum let no task through"):
            waiting.result(60)
    assert client.status()["failure"]["kind"] == "NothingToTrainOn"


def test_a_lease_request_repeated_after_its_episodes_were_committed_is_answered_and_costs_one_command(
    serve: Serve,
) -> None:
    service = serve(small_config(policies__actor=policy_section(4)))
    client = service.start()
    leases = client.lease("n", 2, request_id="same").leases
    client.commit([episode(x, "n") for x in leases])
    before = client.status()["journal"]["command"]
    with ThreadPoolExecutor() as pool:  # a request that is never answered would keep the client waiting for minutes
        again = pool.submit(client.lease, "n", 2, request_id="same")
        try:
            assert again.result(60).leases == []
        finally:
            service.call(service.shell.stop)
    assert service.client().status()["journal"]["command"] == before + 1


def otherwise(table: pa.Table, *, again: bool) -> pa.Table:
    """The same values: columns in another order, and what may be null is said otherwise."""
    names = table.column_names[:: -1 if again else 1]
    return pa.table({name: table.column(name) for name in names})


def test_rows_of_a_node_with_another_arrow_schema_are_batched_with_those_of_others(serve: Serve) -> None:
    client = serve(small_config(consumers={"x": {}})).start()
    for i, lease in enumerate(client.lease("n", 4).leases):
        header, rows = encode_episodes([episode(lease, "n", reward_of(lease))], "n")
        table = pa.Table.from_batches([rows])
        sent = stream_pieces(header, otherwise(table, again=i > 2) if i else table)
        assert set(client._http.post_stream("/episodes", sent, m.EpisodesReply).results.values()) == {"accepted"}
    got, consumed = client.batch("actor", "t", 0), client.consume("x", "actor", 4)
    assert got is not None and consumed is not None
    for _, table in (got, consumed):
        assert table.num_rows == 4
        check_schema(table, TRAINING_SCHEMA, only=True)
