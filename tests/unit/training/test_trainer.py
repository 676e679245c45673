"""The loop against a real dataflow service on port 0 and a node that plays made-up episodes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import zlib

import numpy as np
import pytest
import torch

import astraflow.training.feed.session as session_module
from astraflow.config.schema import RunConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.service import create_dataflow_app, serve_dataflow
from astraflow.errors import ConfigError, Unreachable, WireError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.load import load_model
from astraflow.training.feed.publisher import outward
from astraflow.training.learner import Learner
from astraflow.training.trainer import run_trainer
from astraflow.types import Episode, Trajectory
from astraflow.wire.messages import Join, Resume


@pytest.fixture
def config(tiny_char):
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 4, "seed": 4, "checkpoint_every": 2},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn", "group_size": 2},
            "policies": {
                "actor": {
                    "model": str(tiny_char),
                    "batch": {"groups": 2, "max_staleness": 0},
                    "optimizer": {"lr": 1e-2},
                }
            },
            "dataflow": {"heartbeat_s": 0.1},
        }
    )


@contextlib.contextmanager
def _dataflow(config, run_dir):
    """URL of a real service in a thread of its own."""
    ready, urls, loops = threading.Event(), [], []
    stop = asyncio.Event()

    async def main():
        loops.append(asyncio.get_running_loop())
        await serve_dataflow(create_dataflow_app(config, run_dir, None), "127.0.0.1", 0, on_ready, stop)

    def on_ready(url):
        urls.append(url)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60)
    try:
        yield urls[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)


def _episode(lease, node_id, version):
    """Tokens, logprobs and reward are functions of the episode's id."""
    draw = np.random.default_rng(zlib.crc32(lease.episode_id.encode()))
    size = int(draw.integers(6, 20))
    mask = np.arange(size) >= 3
    whole = Trajectory(
        policy="actor", branch=0, parent_branch=-1, fork_at=0,
        token_ids=draw.integers(3, 61, size).astype(np.int32), loss_mask=mask,
        behavior_logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32), call_index=np.where(mask, 0, -1).astype(np.int16),
        reward=float(lease.episode_id.endswith("/0")),
    )  # fmt: skip
    return Episode(
        episode_id=lease.episode_id, attempt=lease.attempt, node_id=node_id, task=lease.task, trajectories=[whole]
    )


@contextlib.contextmanager
def _node(url):
    """A node that answers every lease with `_episode`, one by one, in order."""
    client, ended = DataflowClient(url, give_up_s=5.0), threading.Event()

    def play():
        while not ended.is_set():
            with contextlib.suppress(WireError):  # as when it was taken for dead on a busy machine
                client.join(Join(node_id="n", name="n", capacity=8, run_id=client.run().run_id))
                while not ended.is_set():
                    reply = client.lease("n", 8, wait_s=0.2)
                    for lease in reply.leases:
                        client.commit([_episode(lease, "n", lease.min_versions["actor"])])
                    if reply.finished:  # it answers at once then
                        ended.wait(0.2)

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)
        client.close()


def _final(run_dir):
    path = latest_checkpoint(run_dir / "checkpoints" / "actor")
    assert path is not None
    return path.name, torch.cat([p.flatten() for p in load_model(path).parameters()])


def test_a_run_ends_with_its_last_checkpoint_and_reports_every_step(config, tmp_path):
    with _dataflow(config, tmp_path) as url, _node(url):
        assert run_trainer(url, "actor", tmp_path) == 0
        status = DataflowClient(url).status()
        assert run_trainer(url, "actor", tmp_path) == 0, "a trainer that comes late finds the run over"
    assert _final(tmp_path)[0] == "step-000004"
    rows = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"step"' in line]
    assert len(rows) == 4
    for name in ("loss", "grad_norm", "policy/entropy", "logprob_gap/p99", "perf/wait_s", "perf/idle_fraction"):
        assert all(f'"{name}"' in row for row in rows), name
    assert status


@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_killed_trainer_is_replaced_and_the_weights_are_those_of_an_uninterrupted_run(
    config, tmp_path, monkeypatch, killed_after
):
    with _dataflow(config, tmp_path / "whole") as url, _node(url):
        run_trainer(url, "actor", tmp_path / "whole")

    class Killed(BaseException):
        pass

    original, calls = Learner.train, []

    def train_and_die(self, table):
        calls.append(self.version)
        metrics = original(self, table)
        if len(calls) == killed_after:
            raise Killed  # after the version became visible, before the acknowledgement
        return metrics

    with _dataflow(config, tmp_path / "cut") as url, _node(url):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Learner, "train", train_and_die)
            run_trainer(url, "actor", tmp_path / "cut")
        assert run_trainer(url, "actor", tmp_path / "cut") == 0
    whole, cut = _final(tmp_path / "whole"), _final(tmp_path / "cut")
    assert whole[0] == cut[0] and torch.equal(whole[1], cut[1])


def test_a_trainer_killed_before_its_last_checkpoint_writes_it_when_it_comes_back(config, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    original = Learner.save

    def save_or_die(self):
        if self.version == 4:
            raise Killed
        return original(self)

    with _dataflow(config, tmp_path) as url, _node(url):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Learner, "save", save_or_die)
            run_trainer(url, "actor", tmp_path)
        assert DataflowClient(url).run().finished
        assert run_trainer(url, "actor", tmp_path) == 0
    assert _final(tmp_path)[0] == "step-000004"


def test_a_damaged_newest_checkpoint_is_passed_over_and_what_came_after_the_one_before_is_done_again(config, tmp_path):
    with _dataflow(config, tmp_path) as url, _node(url):
        run_trainer(url, "actor", tmp_path)
        whole = _final(tmp_path)
        newest = tmp_path / "checkpoints" / "actor" / whole[0] / "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1000])
        assert _final(tmp_path)[0] == "step-000002"
        assert run_trainer(url, "actor", tmp_path) == 0
    again = _final(tmp_path)
    assert again[0] == whole[0] and torch.equal(again[1], whole[1])


def test_a_trainer_that_did_nothing_leaves_its_checkpoint_alone(config, tmp_path, monkeypatch):
    with _dataflow(config, tmp_path / "run") as url, _node(url):
        run_trainer(url, "actor", tmp_path / "run")
    learner = Learner(config, "actor", tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "actor" / "step-000004" / "training_state" / "state.json"
    before = state.stat().st_ino
    learner.save()
    learner.close()
    assert state.stat().st_ino == before, "to replace it would leave a moment with none"


def test_an_older_trainer_ends_by_name(config, tmp_path, monkeypatch):
    original = Learner.train

    with _dataflow(config, tmp_path) as url, _node(url):

        def train_while_replaced(self, table):
            client = DataflowClient(url)
            resume = Resume(trainer_id="newer", version=0, urls=("file:///w",), run_id=client.run().run_id)
            client.resume("actor", resume)
            return original(self, table)

        monkeypatch.setattr(Learner, "train", train_while_replaced)
        with pytest.raises(WireError, match="was replaced by newer") as caught:
            run_trainer(url, "actor", tmp_path)
    assert caught.value.status == 409


def test_a_failure_of_the_heartbeats_ends_the_trainer(config, tmp_path, monkeypatch):
    def refuse(self, policy, trainer_id, stats=None, stores=None):
        raise WireError("heartbeat=1 is refused; for this test", 409)

    monkeypatch.setattr(DataflowClient, "trainer_heartbeat", refuse)
    monkeypatch.setattr(session_module, "POLL_S", 0.05)
    with _dataflow(config, tmp_path) as url, pytest.raises(WireError, match="heartbeat=1"):
        run_trainer(url, "actor", tmp_path)  # no node: it would wait for its first batch


def test_a_stop_signal_writes_a_checkpoint_and_ends_well(config, tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "POLL_S", 0.05)
    original = Learner.train

    def train_then_signal(self, table):
        metrics = original(self, table)
        signal.raise_signal(signal.SIGTERM)
        return metrics

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Learner, "train", train_then_signal)
    with _dataflow(config, tmp_path) as url, _node(url):
        assert run_trainer(url, "actor", tmp_path) == 0
    assert _final(tmp_path)[0] == "step-000001" and signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def nobody():
    """URL of a port where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_service_that_never_answers_is_named_while_waiting_and_given_up(nobody, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(session_module, "RETRY_S", 0.02)
    monkeypatch.setattr(session_module, "FIRST_ANSWER_S", 0.2)
    with pytest.raises(Unreachable, match=r"check that the service runs.*given up after"):
        run_trainer(nobody, "actor", tmp_path)
    assert "waits for the dataflow service, up to 0 s more: url=" + nobody in caplog.text


def test_a_stop_signal_ends_the_wait_for_the_first_answer(nobody, tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "RETRY_S", 0.02)
    monkeypatch.setattr(session_module, "FIRST_ANSWER_S", 10.0)
    original, calls = DataflowClient.run, []

    def signal_then_run(self):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(DataflowClient, "run", signal_then_run)
    assert run_trainer(nobody, "actor", tmp_path) == 0


def test_a_stop_signal_ends_the_wait_for_a_service_that_is_gone_and_leaves_a_checkpoint(config, tmp_path, monkeypatch):
    def gone(*_args):
        calls.append(1)
        assert len(calls) < 20, "it asks on and on"
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        raise Unreachable("url=here gave no answer; for this test")

    calls = []
    for name in ("ack", "checkpoint"):
        monkeypatch.setattr(DataflowClient, name, gone)
    with _dataflow(config, tmp_path) as url, _node(url):
        assert run_trainer(url, "actor", tmp_path) == 0
    assert _final(tmp_path)[0] == "step-000001"


def test_a_full_disk_of_the_service_is_waited_for(config, tmp_path, monkeypatch):
    original, refused = DataflowClient.ack, []

    def ack(self, header, *more):
        if len(refused) < 3:
            refused.append(header.step)
            raise WireError("journal=here cannot be written (full); make room on the disk", 507)
        original(self, header, *more)

    monkeypatch.setattr(DataflowClient, "ack", ack)
    with _dataflow(config, tmp_path) as url, _node(url):
        assert run_trainer(url, "actor", tmp_path) == 0
    assert refused == [1, 1, 1] and _final(tmp_path)[0] == "step-000004"


def test_an_unknown_policy_is_named(config, tmp_path):
    with _dataflow(config, tmp_path) as url, pytest.raises(ConfigError, match=r"policy='critic'.*actor"):
        run_trainer(url, "critic", tmp_path)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:5/weights/a", "http://127.0.0.1:5/weights/a"),
        ("http://0.0.0.0:5/weights/a", "http://127.0.0.1:5/weights/a"),
    ],
)
def test_a_server_on_all_addresses_is_announced_by_one_that_can_be_reached(url, expected):
    assert outward(url, "http://127.0.0.1:9") == expected
