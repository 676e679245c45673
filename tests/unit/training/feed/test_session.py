"""A trainer that is not ours, against a real service."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader

import sharded_models
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError, DataflowError, TrainingError, WireError
from astraflow.testing.dataflow import policy_section, small_config, sources
from astraflow.testing.runs import wait_until
from astraflow.testing.services import DataflowThread, PlayingNode
from astraflow.testing.weights import same_bits
from astraflow.training.feed import session as session_module
from astraflow.training.feed.dataset import PolicyBatches
from astraflow.training.feed.session import Share, TrainerSession
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient
from astraflow.wire.messages import Join
from ranks import run_ranks


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(session_module, "POLL_S", 0.2)


@pytest.fixture
def config():
    return small_config(run__steps=4, dataflow={"heartbeat_s": 0.05}, policies__actor=policy_section(2, 1))


@pytest.fixture
def service(config, tmp_path):
    with DataflowThread(config, tmp_path, sources=sources()) as service:
        yield service


def weights(version):
    return {"w": torch.full((2,), float(version))}


def test_a_whole_run_through_the_loader(service, tmp_path):
    seen = []
    with PlayingNode(service.url), TrainerSession(service.url, "actor", weights=tmp_path / "weights") as session:
        session.publish(0, weights(0))
        session.resume(0)
        batches = PolicyBatches(session, layout="padded", tokens_per_microbatch=64)
        for batch in DataLoader(batches, batch_size=None, num_workers=0):
            assert sum(int(m.loss_mask.sum()) for m in batch.microbatches) == batch.num_tokens
            assert batch.table.num_rows == batch.num_sequences == 4
            session.publish(batch.step, weights(batch.step))
            batches.done(batch, {"loss": 0.5, "bad": float("nan")})
            session.checkpoint()
            seen.append(batch.step)
        session.wait_until_finished()
        versions = service.call(lambda: service.shell.machine.leases.versions())
        fetched = WeightClient().fetch(WeightVersion("actor", 4, versions["actor"].urls))
        over_http = WeightClient().fetch(WeightVersion("actor", 4, versions["actor"].urls[1:]))
    assert seen == [1, 2, 3, 4]
    assert fetched.tensors["w"].tolist() == over_http.tensors["w"].tolist() == [4.0, 4.0]
    assert service.call(lambda: service.shell.machine.state.policies["actor"].covered) == 4


def test_the_next_batch_is_pulled_while_the_trainer_does_something_else(service, monkeypatch):
    with PlayingNode(service.url), TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        batches = PolicyBatches(session)
        steps = iter(batches)
        first = next(steps)
        arrived = threading.Event()
        original = session.next_batch

        def next_batch():
            batch = original()
            arrived.set()
            return batch

        monkeypatch.setattr(session, "next_batch", next_batch)
        assert not arrived.wait(0.2), "nothing is asked for before the step is done"
        batches.done(first)
        assert arrived.wait(60), "pulled without being asked"
        assert next(steps).step == 2


def test_a_batch_comes_again_until_it_is_done_and_another_cannot_be_had(service):
    with PlayingNode(service.url), TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        batches = PolicyBatches(session)
        steps = iter(batches)
        first = next(steps)
        with pytest.raises(TrainingError, match=r"batch=actor/1 is not done"):
            next(steps)
        again = next(iter(batches))
        assert again.table.column("episode_id").equals(first.table.column("episode_id"))
        batches.done(again)
        with pytest.raises(TrainingError, match="is not the one that was taken"):
            batches.done(first)


def test_a_session_that_resumes_at_a_version_gets_what_followed(service):
    taken = {}
    with PlayingNode(service.url):
        with TrainerSession(service.url, "actor") as session:
            session.resume(0, ("file:///w",))
            for header, table in session.batches():
                taken[header.step] = table.column("episode_id").to_pylist()
                session.acknowledge(header)
                if header.step == 1:
                    session.checkpoint()
                if header.step == 3:
                    break
        with TrainerSession(service.url, "actor") as session:
            session.resume(1, ("file:///w",))
            for header, table in session.batches():
                assert header.replay == (header.step <= 3)
                assert taken.setdefault(header.step, table.column("episode_id").to_pylist()) == (
                    table.column("episode_id").to_pylist()
                )
                session.acknowledge(header)
            assert session.version == 4
            with pytest.raises(WireError, match="older than checkpoint"):
                session.resume(0, ("file:///w",))


def test_a_step_is_not_acknowledged_before_its_version_is_published(service, tmp_path):
    with PlayingNode(service.url), TrainerSession(service.url, "actor", weights=tmp_path / "weights") as session:
        session.publish(0, weights(0))
        session.resume()
        header, _ = session.next_batch()
        with pytest.raises(TrainingError, match="actor version=1 is not published"):
            session.acknowledge(header)


def test_ranks_publish_a_sharded_model_together(service, tmp_path):
    with PlayingNode(service.url):
        done = run_ranks(2, sharded_models.train_in_a_session, tmp_path, service.url, True)
        versions = service.call(lambda: service.shell.machine.leases.versions())
    assert done == [[1, 2, 3, 4]] * 2
    fetched = WeightClient().fetch(WeightVersion("actor", 4, versions["actor"].urls[:1]))
    assert same_bits(fetched.tensors, sharded_models.model(4))


def test_a_shard_that_nobody_said_is_one_is_refused_by_name(service, tmp_path):
    with pytest.raises(AssertionError, match=r"tensor embed=DTensor is a part of a tensor; give Share\(sharded=True\)"):
        run_ranks(2, sharded_models.train_in_a_session, tmp_path, service.url, False)


def test_ranks_share_a_batch_and_follow_rank_0(service):
    with PlayingNode(service.url), TrainerSession(service.url, "actor", share=Share(0, 2)) as leader:
        leader.resume(0, ("file:///w",))
        with TrainerSession(service.url, "actor", share=Share(1, 2, leader.trainer_id)) as follower:
            follower.resume(0)
            for _ in range(2):
                tables = []
                for session in (leader, follower):
                    header, table = session.next_batch()
                    assert (header.rank, header.ranks) == (0 if session is leader else 1, 2)
                    tables.append(table)
                assert sum(t.num_rows for t in tables) == header.num_rows == 4
                follower.acknowledge(header)
                leader.acknowledge(leader._held)
        with pytest.raises(TrainingError, match="trainer_id of rank 0"):
            TrainerSession(service.url, "actor", share=Share(1, 2))


def test_a_restart_of_the_service_is_ridden_out(service):
    steps = []
    with PlayingNode(service.url), TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        for header, _ in session.batches():
            if header.step == 2:
                service.restart(pause_s=0.3)
            session.acknowledge(header)
            steps.append(header.step)
    assert steps == [1, 2, 3, 4]


def test_a_trainer_that_was_replaced_is_told(service):
    with PlayingNode(service.url), TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        session.next_batch()
        with TrainerSession(service.url, "actor") as newer:
            newer.resume(0, ("file:///w",))
            with pytest.raises(WireError, match="was replaced by") as caught:
                for _ in range(100):
                    session.next_batch()
        assert caught.value.status == 409


def test_stop_ends_a_wait_for_a_batch(service):
    stop = threading.Event()
    with TrainerSession(service.url, "actor", stop=stop) as session:
        session.resume(0, ("file:///w",))
        threading.Timer(0.1, stop.set).start()
        assert session.next_batch() is None, "no node plays: it would wait for ever"


def test_closing_ends_a_pull_in_the_background(service):
    with TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        batches = PolicyBatches(session)
        batches._pull()
    found = batches._pulled.get(timeout=60)
    assert found is None or isinstance(found, WireError)


def test_workers_and_unknown_policies_are_refused_by_name(service):
    with pytest.raises(ConfigError, match=r"policy='critic'.*actor"):
        TrainerSession(service.url, "critic")
    with TrainerSession(service.url, "actor") as session, pytest.raises(TrainingError, match=r"session\.weights"):
        session.publish(0, weights(0))


def test_heartbeats_go_out_while_the_trainer_computes(service):
    with TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        session.stats["step"] = 7.0
        heard = lambda: service.call(lambda: service.shell.machine.live.trainers["actor"].stats)  # noqa: E731
        tick, waited = threading.Event(), 0.0
        while heard() != {"step": 7.0} and waited < 5:
            tick.wait(0.02)
            waited += 0.02
        assert heard() == {"step": 7.0}


def test_a_stat_that_is_not_finite_ends_nobody(service):
    with TrainerSession(service.url, "actor") as session:
        session.stats |= {"loss": float("nan"), "step": torch.tensor(7.0)}
        session.resume(0, ("file:///w",))
        heard = lambda: service.call(lambda: service.shell.machine.live.trainers["actor"].stats)  # noqa: E731
        wait_until(lambda: heard() == {"step": 7.0}, "a heartbeat", 5)
        session.check()


@pytest.mark.parametrize("value", ["abc", None, [1.0], 10**400])
def test_a_stat_that_is_no_number_is_named(service, value):
    with TrainerSession(service.url, "actor") as session:
        session.resume(0, ("file:///w",))
        session.stats["loss"] = value
        with pytest.raises(DataflowError, match=r"stats\['loss'\]=.* must be a number"):
            wait_until(session.check, "the failure of the heartbeat", 5)


def test_the_session_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, astraflow.training.feed.session; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_client_without_a_run_says_so():
    with pytest.raises(WireError, match="must start with http"):
        DataflowClient("localhost:1")


def test_versions_go_to_the_object_store_of_the_run_and_nodes_are_told_of_it(tmp_path):
    base = (tmp_path / "bucket").as_uri()
    config = small_config(
        run__steps=2, dataflow={"heartbeat_s": 30.0}, weights={"url": base}, policies__actor=policy_section(2, 1)
    )
    with (
        DataflowThread(config, tmp_path / "run", sources=sources()) as service,
        TrainerSession(service.url, "actor", weights=tmp_path / "weights") as session,
        PlayingNode(service.url),
    ):
        session.publish(0, weights(0))
        session.resume(0)
        client, run_id = DataflowClient(service.url), session.run.run_id

        def told():
            return client.join(Join(node_id="n", name="n", capacity=1, run_id=run_id)).versions["actor"]

        for step in range(3):
            wait_until(lambda: len(told().urls) == 3, "the object store to be told of", 20)  # long before heartbeat_s
            newest = told()
            assert newest.version == step
            assert newest.urls[2].startswith(f"{base}/{run_id}/actor?objects=")
            assert WeightClient().fetch(WeightVersion("actor", step, newest.urls[2:])).tensors["w"].tolist() == [
                step,
                step,
            ]
            if step < 2:
                header, _ = session.next_batch()
                session.publish(header.step, weights(header.step))
                session.acknowledge(header)
        session.wait_until_finished()
        assert session.mirror_stats["mirror_version"] == 2
        assert session.stats["mirror_failures"] == 0
        client.close()
