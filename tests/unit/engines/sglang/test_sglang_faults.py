"""Servers that do not start, die, hang, refuse their weights, or were started otherwise."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.config.rooms import build
from astraflow.engines.sglang.command import LIFELINE
from astraflow.engines.sglang.engine import SglangEngine
from astraflow.errors import EngineError, LaunchError
from astraflow.models.load import load_model, state_tensors
from astraflow.types import Sampling

PROMPT = [1, 5, 9]
Start = Callable[..., Any]


@pytest.fixture
def tensors(endless_dir: Path) -> dict[str, torch.Tensor]:
    return state_tensors(load_model(endless_dir))


def test_a_killed_server_comes_back_with_the_newest_weights_and_requests_go_on(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played = start(args={"fake_held": True})
    engine = played.engine
    engine.load_weights(1, tensors).result(60)
    future = engine.submit("a", PROMPT, Sampling(max_tokens=20))
    played.step(5)
    played.kill()
    played.until(lambda: engine.stats()["restarts"] == 1 and engine._keeper.serving.is_set())
    assert played.asked("label") == [[{"new_version": "1", "abort_all_requests": False}]]
    played.step(3)
    engine.load_weights(2, tensors).result(60)
    played.tell("release")
    generation = future.result(60)
    assert generation.versions.tolist() == [1] * 8 + [2] * 12
    assert played.bodies()[0]["input_ids"] == PROMPT + generation.token_ids[:5].tolist()


@pytest.mark.parametrize("how", ["refuse", "die", "hang"])
def test_an_update_that_fails_is_made_up_for_by_another_life(
    start: Start, tensors: dict[str, torch.Tensor], how: str
) -> None:
    played = start(hang_s=1.0)
    played.engine.load_weights(0, tensors).result(60)
    played.tell("fault", update=how)
    assert played.engine.load_weights(1, tensors).result(60) == 1
    assert played.engine.stats()["restarts"] == 1
    assert set(played.engine.submit("a", PROMPT, Sampling(max_tokens=3)).result(60).versions.tolist()) == {1}


def test_a_server_that_answers_no_more_is_started_again(start: Start) -> None:
    played = start()
    played.engine._keeper.limits = replace(played.engine._keeper.limits, watch_s=0.02, answer_s=0.2)
    played.tell("fault", hang="now")
    played.until(lambda: played.engine.stats()["restarts"] == 1 and played.engine._keeper.serving.is_set())
    assert len(played.engine.submit("a", PROMPT, Sampling(max_tokens=20)).result(60).token_ids) == 20


def test_a_server_that_dies_too_often_ends_the_engine_with_its_last_words(start: Start) -> None:
    played = start(args={"fake_held": True}, max_restarts=0)
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=20))
    played.step(5)
    played.kill()
    assert "SIGKILL" in str(played.engine.ended.result(60))
    assert "max_restarts=0" in str(future.exception(60))


@pytest.mark.parametrize(
    ("says", "rule", "fix"),
    [
        ("memory", "not enough memory", "mem_fraction_static"), ("port", "port is taken", "engine.port"),
        ("model", "cannot load this model", "local"), ("argument", "does not know an argument", "engine.args"),
        ("gpu", "finds no GPU", "local"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_start_says_why_and_what_to_do(start: Start, says: str, rule: str, fix: str) -> None:
    with pytest.raises(EngineError) as caught:
        start(args={"fake_says": says})
    message = str(caught.value)
    assert rule in message and fix in caught.value.fix and "last lines of" in message


def test_a_server_that_is_not_ready_in_time(start: Start) -> None:
    with pytest.raises(LaunchError, match=r"ready_s"):
        start(args={"fake_silent": True}, ready_s=0.7)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("-0.7", r"sglang logprobs=.*must be near -3.69"),  # of the policy at temperature 1
        ("0.0", r"sglang logprobs=.*before top-k"),  # of what top-k left
    ],
)
def test_a_server_with_other_logprobs_is_refused(start: Start, said: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        start(args={"fake_probe": said})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"version": ""}, "has no SGLang"),
        ({"version": "0.4.9"}, "sglang=0.4.9 is not a version"),
        ({"version": "0.6.0"}, "sglang=0.6.0 is not a version"),
        (None, "is no Python that runs"),
    ],
)
def test_environments_that_cannot_serve(
    start: Start, tmp_path: Path, found: dict[str, Any] | None, message: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found) if found else ''}'\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(EngineError, match=message):
        start(python=str(python))
    with pytest.raises(EngineError, match="is no Python that runs"):
        start(python=str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["quantization", "stream-interval", "speculative_algorithm"])
def test_arguments_that_are_not_free(start: Start, name: str) -> None:
    with pytest.raises(EngineError, match="is set by the engine itself"):
        start(args={name: "x"})


def test_the_server_does_not_get_the_runs_token_nor_other_logprobs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "secret-of-the-run")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    start()  # the fake ends at once where it has one of them


def test_nothing_is_left_of_a_closed_engine(start: Start) -> None:
    engine = start().engine
    process, files, written = engine._keeper.host._process, engine._shadow.directory, engine._keeper.host.log_file
    assert files.is_dir() and written.is_file()
    engine.close()
    assert process.returncode is not None and not files.exists() and not written.exists()


def test_a_server_that_runs_already(start: Start, endless_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    owner = start()
    owner.tell("pause")  # as a node leaves it that died within a swap
    engine = SglangEngine(endless_dir, url=owner.url, dtype="float32")
    try:
        engine.load_weights(3, tensors).result(60)
        assert set(engine.submit("a", PROMPT, Sampling(max_tokens=3)).result(60).versions.tolist()) == {3}
        engine.close()
        assert owner.engine._keeper.host.ended() is None, "it is not ours to end"
        for about, message in (
            ({"dtype": "bfloat16"}, "sglang dtype=bfloat16 must be float32"),
            ({"incremental_streaming_output": False}, "--incremental-streaming-output"),
            ({"stream_interval": 8}, "--stream-interval 1"),
            ({"speculative_algorithm": "EAGLE"}, "sglang speculative_algorithm=EAGLE must be None"),
            ({"version": "0.5.10"}, "sglang=0.5.10 is not a version"),
        ):
            owner.tell("fault", about=json.dumps(about))
            with pytest.raises(EngineError, match=message):
                SglangEngine(endless_dir, url=owner.url, dtype="float32")
        with pytest.raises(EngineError, match=r"engine.deterministic=True is not what the server"):
            SglangEngine(endless_dir, url=owner.url, dtype="float32", deterministic=True)
        with pytest.raises(EngineError, match=r"engine.url"):
            SglangEngine(endless_dir, url=owner.url, port=5)
        owner.engine.close()
        with pytest.raises(LaunchError, match="gave no answer"):
            SglangEngine(endless_dir, url=owner.url, dtype="float32", ready_s=0.3)
    finally:
        engine.close()


def test_several_servers_serve_as_one(start: Start, endless_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    owners = [start(), start()]
    engine = SglangEngine(endless_dir, urls=[owner.url for owner in owners], dtype="float32")
    try:
        engine.load_weights(3, tensors).result(60)
        futures = [engine.submit(str(number), PROMPT, Sampling(max_tokens=40)) for number in range(8)]
        assert {version for future in futures for version in future.result(60).versions.tolist()} == {3}
        assert all(owner.bodies() and len(owner.asked("update")) == 1 for owner in owners)
    finally:
        engine.close()


def test_a_run_file_builds_it(python: str, endless_dir: Path) -> None:
    options = {"python": python, "dtype": "float32", "max_context": 64, "max_concurrency": 4, "threads": 1, "seed": 9}
    engine = build("engines", "sglang", options, "policies.p.engine", model_dir=endless_dir)
    try:
        assert engine.max_context == 64
    finally:
        engine.close()


def test_the_servers_lifeline(tmp_path: Path) -> None:
    """The whole group ends when its standard input closes. SGLang is played by one module."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import multiprocessing, sys, time\n"
        "def work(queue):\n    queue.put(sys.argv[1:])\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,))\n    child.start()\n"
        "    print(child.pid, queue.get(), flush=True)\n    child.join()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", LIFELINE, "sglang.launch_server", "--port", "1"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)}, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        child, _, rest = server.stdout.readline().decode().partition(" ")
        assert rest.strip() == "['--port', '1']", "also in processes that it spawns, as SGLang does"
        server.stdin.close()
        assert server.wait(60) == -signal.SIGKILL
        assert server.stdout.read() == b"", "its child has closed the pipe too"
    with pytest.raises(ProcessLookupError):
        wait_gone(int(child))


def wait_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # nobody has waited for it yet
        time.sleep(0.01)
