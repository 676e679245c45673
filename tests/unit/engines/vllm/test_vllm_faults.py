"""Servers that do not start, die, hang, or refuse their weights."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.config.rooms import build
from astraflow.engines.vllm.engine import VllmEngine
from astraflow.errors import EngineError, LaunchError
from astraflow.models.load import load_model, state_tensors
from astraflow.types import Sampling

PROMPT = [1, 5, 9]
Start = Callable[..., Any]


@pytest.fixture
def tensors(endless_dir: Path) -> dict[str, torch.Tensor]:
    return state_tensors(load_model(endless_dir))


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor * 2 for name, tensor in tensors.items()}


def test_a_killed_server_comes_back_with_the_newest_weights_and_requests_go_on(
    start: Start, tensors: dict[str, torch.Tensor]
) -> None:
    played = start(args={"fake_held": True})
    engine = played.engine
    engine.load_weights(0, tensors).result(60)
    engine.load_weights(1, changed(tensors)).result(60)
    before = engine.effective_weights().result(60)
    future = engine.submit("a", PROMPT, Sampling(max_tokens=20))
    played.step(5)
    played.kill()
    played.until(lambda: engine.stats()["restarts"] == 1 and engine._keeper.serving.is_set())
    played.step(3)
    engine.load_weights(2, changed(tensors)).result(60)
    played.tell("release")
    generation = future.result(60)
    assert generation.versions.tolist() == [1] * 8 + [2] * 12
    bodies = [entry[1] for entry in played.tell("seen") if entry[0] == "generate"]
    assert bodies[0]["token_ids"] == PROMPT + generation.token_ids[:5].tolist()
    assert engine.effective_weights().result(60) == replace_version(before, 2)


def replace_version(weights: Any, version: int) -> Any:
    return type(weights)(version, weights.dtype, weights.checksum)


def test_a_server_that_samples_nothing_is_started_again(start: Start) -> None:
    played = start(args={"fake_held": True}, hang_s=0.5)
    played.engine._keeper.limits = replace(played.engine._keeper.limits, watch_s=0.02)
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=20))
    played.step(5)
    played.until(lambda: played.engine.stats()["restarts"] == 1 and played.engine._keeper.serving.is_set())
    played.tell("release")
    assert len(future.result(60).token_ids) == 20


def test_a_server_that_answers_no_more_is_started_again(start: Start) -> None:
    played = start()
    played.engine._keeper.limits = replace(played.engine._keeper.limits, watch_s=0.02, answer_s=0.2)
    played.engine._keeper.host.log_file.unlink()  # temporary files are cleared away at times
    played.tell("fault", hang="now")
    played.until(lambda: played.engine.stats()["restarts"] == 1 and played.engine._keeper.serving.is_set())
    assert len(played.engine.submit("a", PROMPT, Sampling(max_tokens=20)).result(60).token_ids) == 20


@pytest.mark.parametrize("step", ["start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("how", ["refuse", "die"])
def test_an_update_that_fails_is_made_up_for_by_another_life(
    start: Start, tensors: dict[str, torch.Tensor], step: str, how: str
) -> None:
    played = start()
    played.engine.load_weights(0, tensors).result(60)
    played.tell("fault", **{step: how})
    assert played.engine.load_weights(1, changed(tensors)).result(60) == 1
    assert played.engine.stats()["restarts"] == 1
    seen = played.engine.effective_weights().result(60)
    assert seen.version == 1 and len(seen.checksum) == 32
    assert set(played.engine.submit("a", PROMPT, Sampling(max_tokens=3)).result(60).versions.tolist()) == {1}


def test_an_update_that_hangs_is_made_up_for_by_another_life(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    played = start(hang_s=1.0)
    played.tell("fault", update_weights="hang")
    assert played.engine.load_weights(1, tensors).result(60) == 1
    assert played.engine.stats()["restarts"] == 1


def test_weights_that_did_not_arrive_are_seen(start: Start, tensors: dict[str, torch.Tensor]) -> None:
    played = start()
    played.tell("fault", update_weights="torn")
    played.engine.load_weights(1, tensors).result(60)
    assert "other numbers in 1 weights (a.weight)" in played.engine.effective_weights().result(60).checksum
    played.tell("fault", compare="unknown")
    played.engine.load_weights(2, tensors).result(60)
    assert played.engine.effective_weights().result(60).checksum == "", "what cannot be looked at is not claimed"


def test_a_server_that_dies_too_often_ends_the_engine_with_its_last_words(start: Start) -> None:
    played = start(args={"fake_held": True}, max_restarts=0)
    future = played.engine.submit("a", PROMPT, Sampling(max_tokens=20))
    played.step(5)
    ended_first: list[bool] = []
    future.add_done_callback(lambda _: ended_first.append(played.engine.ended.done()))
    played.kill()
    assert "SIGKILL" in str(played.engine.ended.result(60))
    assert "max_restarts=0" in str(future.exception(60)) and ended_first == [True]
    with pytest.raises(EngineError, match="max_restarts=0"):
        played.engine.submit("b", PROMPT, Sampling()).result(60)


@pytest.mark.parametrize(
    ("says", "rule", "fix"),
    [
        ("memory", "not enough memory", "max_context"), ("port", "port is taken", "engine.port"),
        ("model", "cannot load this model", "local"), ("argument", "does not know an argument", "engine.args"),
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


def test_a_port_that_is_taken(start: Start) -> None:
    port = start().engine._keeper.server._web._port
    with pytest.raises(EngineError, match=rf"engine.port={port} cannot be had"):
        start(port=port)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"version": "", "plugin": False}, "has no vLLM"),
        ({"version": "0.9.1", "plugin": True}, "vllm=0.9.1 is not a version"),
        ({"version": "0.32.0", "plugin": False}, "has vLLM but not astraflow"),
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


@pytest.mark.parametrize("options", [{"args": {"logprobs_mode": "raw_logprobs"}}, {"args": {"max-model-len": 4}}])
def test_arguments_that_are_not_free(start: Start, options: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="is set by the engine itself"):
        start(**options)


def test_the_server_does_not_get_the_runs_token(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "secret-of-the-run")
    start()  # the fake ends at once where it has one


def test_nothing_is_left_of_a_closed_engine(start: Start) -> None:
    engine = start().engine
    process, files, written = engine._keeper.host._process, engine._shadow.directory, engine._keeper.host.log_file
    assert files.is_dir() and written.is_file()
    engine.close()
    assert process.returncode is not None and not files.exists() and not written.exists()


def test_a_server_that_runs_already(
    start: Start, python: str, endless_dir: Path, tensors: dict[str, torch.Tensor]
) -> None:
    owner = start()
    url = owner.engine._keeper.server._web.url
    engine = VllmEngine(endless_dir, url=url, dtype="float32")
    try:
        engine.load_weights(3, tensors).result(60)
        assert set(engine.submit("a", PROMPT, Sampling(max_tokens=3)).result(60).versions.tolist()) == {3}
        engine.close()
        assert owner.engine._keeper.host.ended() is None, "it is not ours to end"
        with pytest.raises(EngineError, match=r"vllm dtype=float32 must be bfloat16"):
            VllmEngine(endless_dir, url=url, dtype="bfloat16")
        owner.tell("fault", about=json.dumps({"logprobs_mode": "raw_logprobs"}))
        with pytest.raises(EngineError, match=r"--logprobs-mode processed_logprobs"):
            VllmEngine(endless_dir, url=url, dtype="float32")
        owner.tell("fault", about=json.dumps({"sees_weights": False}))
        with pytest.raises(EngineError, match=r"engine.share"):
            VllmEngine(endless_dir, url=url, dtype="float32")
        owner.engine.close()
        with pytest.raises(LaunchError, match="gave no answer"):
            VllmEngine(endless_dir, url=url, dtype="float32", ready_s=0.3)
    finally:
        engine.close()


def test_a_server_of_somebody_else_that_is_gone_ends_the_engine(start: Start, endless_dir: Path) -> None:
    owner = start()
    engine = VllmEngine(endless_dir, url=owner.engine._keeper.server._web.url, dtype="float32", ready_s=0.2)
    try:
        engine._keeper.limits = replace(engine._keeper.limits, watch_s=0.02)
        owner.engine.close()
        assert "max_restarts=3" in str(engine.ended.result(60))
    finally:
        engine.close()


def test_a_run_file_builds_it(python: str, endless_dir: Path) -> None:
    options = {"python": python, "dtype": "float32", "max_context": 64, "max_concurrency": 4, "threads": 1, "seed": 9}
    engine = build("engines", "vllm", options, "policies.p.engine", model_dir=endless_dir)
    try:
        assert engine.max_context == 64
    finally:
        engine.close()


def test_the_servers_lifeline(tmp_path: Path) -> None:
    """`inside.serve` ends the whole group when its standard input closes. vLLM is played by one module."""
    import subprocess

    module = tmp_path / "vllm" / "entrypoints" / "openai"
    module.mkdir(parents=True)
    (module / "api_server.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, sys.argv[1:], flush=True)\nchild.wait()\n"
    )
    source = Path(sys.modules["astraflow"].__file__ or "").parents[1]
    with subprocess.Popen(
        [sys.executable, "-m", "astraflow.engines.vllm.inside.serve", "--port", "1"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{source}:{tmp_path}"}, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        child, _, rest = server.stdout.readline().decode().partition(" ")
        assert rest.strip() == "['--port', '1']"
        server.stdin.close()
        assert server.wait(60) == -signal.SIGKILL
        assert server.stdout.read() == b"", "its child has closed the pipe too"
    with pytest.raises(ProcessLookupError):
        wait_gone(int(child))


def wait_gone(pid: int) -> None:
    import time

    end = time.monotonic() + 30
    while time.monotonic() < end:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # nobody has waited for it yet
        time.sleep(0.01)
