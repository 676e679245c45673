"""A whole node against the real dataflow service, with the scripted engine: all in this process but the workers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import json
import os
import re
import signal
import threading
from contextlib import asynccontextmanager, closing

import numpy as np
import pytest
import torch
from rollout_scripts import EOS, ids, text

from astraflow.config.load import check_run
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.service import create_dataflow_app, serve_dataflow
from astraflow.engines.scripted import ScriptedEngine
from astraflow.errors import AstraFlowError, ConfigError, EngineError, Problem, Unreachable, WireError
from astraflow.rollout import node as node_module
from astraflow.rollout.loop import Guarded
from astraflow.rollout.node import NodeOptions, serve_node
from astraflow.rollout.policies import PolicyOptions, Weights, start_policy
from astraflow.rollout.pool import PoolLimits
from astraflow.swarm import RunOver, Swarm
from astraflow.types import BatchHeader
from astraflow.weights.client import WeightClient
from astraflow.weights.store import FileStore
from astraflow.wire.app import bind
from astraflow.wire.codec import flat_values, list_lengths
from astraflow.wire.messages import Resume

LIMITS = PoolLimits(pulse_s=0.05, stall_s=0.5, grace_s=0.3)


def run_file(**changes):
    raw = {
        "run": {"name": "node-test", "steps": 3},
        "sources": {"train": {"type": "calculator"}},
        "workflow": {"type": "tool_use", "environment": "calculator", "max_turns": 2, "group_size": 2, "timeout_s": 20},
        "policies": {
            "actor": {
                "model": "tiny-char",
                "engine": {"type": "scripted", "script": "rollout_scripts:right_calls", "logprob": -7.25},
                "operators": ["keep_all"],
                "batch": {"groups": 2, "max_staleness": 1},
                "sampling": {"max_tokens": 8},
            }
        },
        "dataflow": {"heartbeat_s": 0.1},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        table = raw
        for part in parents:
            table = table[part]
        table[last] = value
    return check_run(raw, "test")


class Service:
    """The dataflow service of one run, and what a trainer would do to it."""

    def __init__(self, config, directory):
        self.config, self.directory = config, directory
        self.store = FileStore(directory / "weights", "actor", durable=False)
        self.version = 0
        self.url = ""

    @asynccontextmanager
    async def running(self, port=0):
        app = create_dataflow_app(self.config, self.directory, None)
        stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve_dataflow(app, "127.0.0.1", port, url.set_result, stop))
        self.url = await url
        self.client = DataflowClient(self.url)
        try:
            yield self
        finally:
            stop.set()
            await server
            self.client.close()

    async def resume(self):
        self.store.publish(self.version, {"w": torch.full((4,), float(self.version))})
        run = await asyncio.to_thread(self.client.run)
        resume = Resume(trainer_id="t", version=self.version, urls=(self.store.url,), run_id=run.run_id)
        await asyncio.to_thread(self.client.resume, "actor", resume)

    async def batch(self):
        return await asyncio.to_thread(lambda: self.client.batch("actor", "t", self.version, wait_s=60))

    async def train(self) -> tuple[BatchHeader, object]:
        header, table = await self.batch()
        self.version += 1
        self.store.publish(self.version, {"w": torch.full((4,), float(self.version))})
        await asyncio.to_thread(self.client.ack, header, "t")
        return header, table

    def node(self, tmp_path, **options):
        return NodeOptions(
            dataflow_url=self.url, name="n", cache=tmp_path / "cache", limits=LIMITS,
            **{"concurrency": 8, "give_up_s": 5.0, **options},
        )  # fmt: skip


@pytest.fixture
def service(tmp_path):
    (tmp_path / "run").mkdir()
    return lambda **changes: Service(run_file(**changes), tmp_path / "run")


async def test_two_turns_are_committed_token_by_token(service, tmp_path):
    async with service().running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path)))
        await running.resume()
        header, table = await running.train()
        assert header.num_episodes == table.num_rows == 4
        assert set(table.column("engine").to_pylist()) == {"scripted-float32@n"}
        for row in table.to_pylist():
            sequence = text(row["token_ids"])
            problem = sequence[5:8]
            answer = sequence[sequence.index("<", 5) + 1 :].removeprefix("eos>")
            assert sequence.startswith(f"<bos>{problem}?[{problem}]<eos><")
            call, said = [*ids(f"[{problem}]"), EOS], [*ids(answer.split("<eos>")[0].split(">")[1]), EOS]
            given = len(row["token_ids"]) - 5 - len(call) - len(said)
            assert row["loss_mask"] == [False] * 5 + [True] * len(call) + [False] * given + [True] * len(said)
            assert row["call_index"] == [-1] * 5 + [0] * len(call) + [-1] * given + [1] * len(said)
            mask = np.array(row["loss_mask"])
            assert set(np.array(row["behavior_logprobs"])[mask]) == {-7.25}
            assert set(np.array(row["versions"])[mask]) == {0}
            assert set(np.array(row["versions"])[~mask]) == {-1}
            assert row["reward"] == 1.0
            assert (row["finish_reason"], row["truncated"], row["parent_branch"]) == ("stop", False, -1)
        assert list_lengths(table["token_ids"].combine_chunks()).sum() == len(
            flat_values(table["versions"].combine_chunks())
        )
        await running.train()
        _, third = await running.train()
        assert max(max(v) for v in third["versions"].to_pylist()) >= 1
        await asyncio.wait_for(node, 60)  # the run is over


async def test_a_restart_of_the_service_is_survived(service, tmp_path):
    services = service(policies__actor__engine={
        "type": "scripted", "script": "rollout_scripts:right_calls", "delay_s": 0.3,
    })  # fmt: skip
    async with services.running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path)))
        await running.resume()
        port = int(running.url.rpartition(":")[2])
        while not any(n["stats"].get("calls") for n in (await asyncio.to_thread(running.client.status))["nodes"]):
            await asyncio.sleep(0.02)
    async with services.running(port) as running:
        await running.resume()
        for _ in range(3):
            await running.train()
        await asyncio.wait_for(node, 60)


async def test_an_engine_that_ends_takes_its_node_with_it_and_the_leases_go_back(service, tmp_path, monkeypatch):
    engines = []

    class Watched(ScriptedEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, held=True, **options)
            engines.append(self)

    monkeypatch.setattr("astraflow.engines.scripted.ScriptedEngine", Watched)
    async with service().running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path)))
        await running.resume()
        while not engines or engines[0].stats()["running"] < 4:
            await asyncio.sleep(0.02)
        engines[0].fail(EngineError("engine", "KeyError", "ended its thread", "see its log"))
        with pytest.raises(EngineError, match="engine=KeyError ended its thread"):
            await asyncio.wait_for(node, 60)
        status = await asyncio.to_thread(running.client.status)
        assert (status["nodes"], status["episodes"]["committed"]) == ([], 0)
        monkeypatch.undo()
        node = asyncio.create_task(serve_node(running.node(tmp_path)))
        header, _ = await running.train()
        assert header.num_episodes == 4
        node.cancel()
        await asyncio.wait({node})


async def test_a_service_that_stays_away_ends_the_node_by_name(service, tmp_path):
    async with service().running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path, give_up_s=0.5)))
        await running.resume()
        await running.batch()
    with pytest.raises(Unreachable, match="given up after"):
        await asyncio.wait_for(node, 60)


async def test_a_workflow_that_cannot_be_built_ends_the_node(service, tmp_path):
    async with service(workflow__environment="nonsense").running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path)))
        with pytest.raises(ConfigError, match=r"workflow\.environment.*nonsense"):  # exit code 2: not started again
            await asyncio.wait_for(node, 60)
        assert not (await asyncio.to_thread(running.client.status))["nodes"]


async def test_a_node_that_the_service_forgot_enters_again(service, tmp_path):
    async with service().running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path)))
        await running.resume()
        await running.train()
        (known,) = (await asyncio.to_thread(running.client.status))["nodes"]
        await asyncio.to_thread(running.client.drain, known["id"])
        for _ in range(2):
            await running.train()
        await asyncio.wait_for(node, 60)


async def test_a_signal_makes_the_node_finish_and_leave(service, tmp_path):
    async with service().running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path), signals=(signal.SIGUSR1,)))
        await running.resume()
        await running.batch()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(node, 60)
        status = await asyncio.to_thread(running.client.status)
        assert not status["nodes"]
        header, _ = await running.train()  # what was played before it left is there
        assert header.num_episodes == 4


async def test_an_engine_setting_out_of_its_range_is_a_problem_of_the_run_file(tmp_path):
    section = run_file(policies__actor__engine={"type": "local", "max_context": 1}).policies["actor"]
    weights = Weights("actor", WeightClient(None), lambda: None)
    with pytest.raises(Problem, match=r"policies\.actor\.engine\.max_context=1 must be >= 2; use 0") as caught:
        await start_policy("actor", section, PolicyOptions(tmp_path, 0, "n", 1, 1), weights)
    assert type(caught.value) is Problem and caught.value.exit_code == 2


def play_episodes(url: str, stop: threading.Event) -> int:
    """A client of a door: the calculator's first turn, and a reward."""
    played = 0
    with Swarm(url, give_up_s=5.0) as swarm, contextlib.suppress(RunOver):
        while not stop.is_set():
            for play in swarm.leases(4, 0.5):
                with play, closing(http.client.HTTPConnection(play.base_url[7:-3])) as connection:
                    body = {"model": "actor", "messages": [{"role": "user", "content": play.task["text"]}]}
                    head = {"authorization": f"Bearer {play.api_key}", "content-type": "application/json"}
                    connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
                    assert connection.getresponse().read()
                    play.finish(1.0, metrics={"elsewhere": 1.0})
                    played += 1
    return played


async def stat_of(running, name):
    (node,) = (await asyncio.to_thread(running.client.status))["nodes"]
    return node[name] if name in node else node["stats"].get(name)


@pytest.mark.parametrize("workers", [0, 1])
async def test_clients_of_a_door_play_alone_or_beside_the_workers(service, tmp_path, workers):
    async with service().running() as running:
        door, url = bind("127.0.0.1", 0, "test"), asyncio.get_running_loop().create_future()
        options = running.node(tmp_path, workers=workers, door=door, on_door=url.set_result, concurrency=2)
        node = asyncio.create_task(serve_node(options))
        await running.resume()
        stop = threading.Event()
        client = asyncio.create_task(asyncio.to_thread(play_episodes, await url, stop))
        for step in (1, 2, 3):
            header, table = await running.train()
            assert (header.step, table.num_rows) == (step, 4)
            if step == 1:
                while await stat_of(running, "swarm/clients") != 1.0:
                    await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            await node  # the run is over: the client hears so, and the node ends
            assert await client > 0
        stop.set()


async def test_a_node_without_anybody_who_asks_leases_nothing(service, tmp_path):
    async with service().running() as running:
        door, url = bind("127.0.0.1", 0, "test"), asyncio.get_running_loop().create_future()
        node = asyncio.create_task(serve_node(running.node(tmp_path, workers=0, door=door, on_door=url.set_result)))
        await running.resume()
        swarm = Swarm(await url, give_up_s=5.0)
        play = await asyncio.to_thread(swarm.lease, 10.0)
        assert play is not None
        assert await stat_of(running, "leased") == 1
        await asyncio.to_thread(play.abort)
        while await stat_of(running, "leased"):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(swarm.close)
        node.cancel()
        await asyncio.gather(node, return_exceptions=True)


async def test_a_refused_edit_is_in_the_status_of_the_run(service, tmp_path):
    file = tmp_path / "noted_workflow.py"
    call = 'await llm["actor"].chat([{"role": "user", "content": "1+1?"}])'
    file.write_text(f"async def play(task, llm):\n    {call}\n    return 1.0\n")
    async with service(workflow={"type": f"{file}:play", "group_size": 2, "timeout_s": 20}).running() as running:
        node = asyncio.create_task(serve_node(running.node(tmp_path, watch=True)))
        await running.resume()
        await running.train()
        async with asyncio.timeout(60):
            while len(code := (await stat_of(running, "notes")).get("code", "")) != 12:
                await asyncio.sleep(0.02)
            file.write_text("def broken(:\n")
            while "SyntaxError" not in (await stat_of(running, "notes")).get("edit", ""):
                await asyncio.sleep(0.02)
        assert (await stat_of(running, "notes"))["code"] == code
        assert (await asyncio.to_thread(running.client.status))["episodes"]["codes"][code]["reward"] == 1.0
        node.cancel()
        await asyncio.gather(node, return_exceptions=True)


async def test_a_row_of_the_run_is_tried_at_the_door_of_a_node(service, tmp_path):
    from astraflow.launch.remote.trial import TrialPlay, play_trial

    async with service().running() as running:
        door, url = bind("127.0.0.1", 0, "test"), asyncio.get_running_loop().create_future()
        node = asyncio.create_task(serve_node(running.node(tmp_path, workers=0, door=door, on_door=url.set_result)))
        await running.resume()
        played = TrialPlay(url=await url, workflow="tool_use", options={"environment": "calculator"}, row=17)
        task, trial = await asyncio.to_thread(play_trial, played)
        assert (task.source, task.row, trial.error) == ("train", 17, None)
        assert {branch.reward for branch in trial.branches} == {1.0} and trial.num_calls == {"actor": 2}
        reply = await asyncio.to_thread(running.client.status)
        assert (reply["episodes"]["committed"], reply["episodes"]["leased"]) == (0, 0)
        with pytest.raises(WireError, match="row=1000000 must be below"):
            await asyncio.to_thread(play_trial, TrialPlay(url=played.url, workflow="tool_use", row=10**6))
        node.cancel()
        await asyncio.gather(node, return_exceptions=True)


LOOPS = (
    "heartbeat loop", "commit loop", "deadline loop", "lease loop", "worker pool", "concurrency loop", "swarm door",
    "swarm pool", "swarm returns",
)  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
async def test_each_loop_that_dies_ends_the_node_by_its_name(service, tmp_path, monkeypatch, loop):
    spawn = Guarded.spawn

    async def planted():
        raise ZeroDivisionError("planted")

    def spawn_or_plant(tasks, name, coroutine):
        if name != loop:
            return spawn(tasks, name, coroutine)
        coroutine.close()
        return spawn(tasks, name, planted())

    monkeypatch.setattr(Guarded, "spawn", spawn_or_plant)
    with closing(bind("127.0.0.1", 0, "door")) as door:
        async with service().running() as running:
            node = asyncio.create_task(serve_node(running.node(tmp_path, door=door, min_concurrency=1)))
            await running.resume()
            with pytest.raises(AstraFlowError, match=f"task='{loop}' of node n died of ZeroDivisionError: planted"):
                await asyncio.wait_for(node, 60)


def test_all_loops_of_a_node_are_among_them():
    spawned = set(re.findall(r'tasks\.spawn\("([^"]+)"', inspect.getsource(node_module)))
    assert spawned == {*LOOPS, "look at other nodes", "goodbye"}
