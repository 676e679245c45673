"""What every engine that is a server must do, tried over a fake of the server: the conformance suite of engines, and
servers that do not start, die, hang, refuse their weights or are somebody else's. Subclass it beside a fixture `start`
(`played.starts`) and one `python`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from astraflow.config.rooms import build
from astraflow.engines.served.engine import ServedEngine
from astraflow.errors import EngineError, LaunchError, ModelError
from astraflow.testing.engines.suite import EngineCase, EngineSuite, check_generation
from astraflow.types import Generation, Sampling
from played import Played, script

PROMPT = [1, 5, 9]
Start = Callable[..., Played]
Tensors = dict[str, torch.Tensor]


class ServedSuite(EngineSuite):
    """Held: tokens come when the test says so. After a crash requests go on in another life of the server."""

    kind: ClassVar[str]
    engine: ClassVar[Callable[..., ServedEngine]]
    held: ClassVar[dict[str, Any]] = {"args": {"fake_held": True}}  # options with which it says all of its versions
    tick: ClassVar[int] = 1  # tokens
    names: ClassVar[tuple[str, str]]  # of ids and of the limit in what is sent
    updates: ClassVar[tuple[str, ...]]  # steps of an update
    starts: ClassVar[dict[str, tuple[str, str]]]  # last words of a server -> the rule and a part of the fix
    environments: ClassVar[list[tuple[dict[str, Any] | None, str]]]  # what is found -> the message
    abouts: ClassVar[list[tuple[dict[str, Any], str]]]  # a server that runs already, otherwise -> the message
    ours: ClassVar[list[str]]  # arguments that are not free

    @pytest.fixture
    def case(self, start: Start, tensors: Tensors) -> EngineCase:
        played = start(**self.held)

        def crash() -> None:
            played.kill()
            played.until_restarted()

        return EngineCase(
            engine=played.engine, prompt=[1, 5, 9, 13, 17, 21], long_tokens=300, tensors=tensors,
            advance=played.step, crash=crash, recovers=True, finish=lambda: played.tell("release"),
            tick=lambda: played.tell("step", tokens=self.tick, requests=0),
        )  # fmt: skip

    @pytest.fixture
    def owner(self, start: Start) -> Played:
        """A server of somebody else, of which only the URL is used."""
        return start()

    @pytest.fixture
    def attach(self, endless_dir: Path) -> Iterator[Callable[..., ServedEngine]]:
        """Starts an engine without a server of its own."""
        started: list[ServedEngine] = []

        def make(**options: Any) -> ServedEngine:
            started.append(type(self).engine(endless_dir, **{"dtype": "float32", **options}))
            return started[-1]

        yield make
        for engine in started:
            engine.close()

    # requests

    def test_logprobs_are_those_of_their_tokens(self, start: Start) -> None:
        generation = start().engine.submit("a", PROMPT, Sampling(max_tokens=40)).result(60)
        assert generation.logprobs.tolist() == (-generation.token_ids / 64).tolist()

    def test_a_request_that_starts_within_a_swap_is_of_the_new_version(self, start: Start, tensors: Tensors) -> None:
        played = start()
        swaps = [played.engine.load_weights(version, tensors) for version in range(6)]
        futures = [played.engine.submit(str(number), PROMPT, Sampling(max_tokens=9)) for number in range(40)]
        assert [swap.result(60) for swap in swaps] == list(range(6))
        for future in futures:
            check_generation(future.result(60))

    def test_versions_that_the_server_does_not_confirm_fail_the_request(self, start: Start) -> None:
        played = start()
        played.tell("fault", spans="wrong")
        with pytest.raises(EngineError, match=r"weight versions=.*77"):
            played.engine.submit("a", PROMPT, Sampling(max_tokens=9)).result(60)
        assert len(played.engine.submit("b", PROMPT, Sampling(max_tokens=9)).result(60).token_ids) == 9

    def test_a_request_that_the_server_refuses_fails_alone_and_says_why(self, start: Start) -> None:
        played = start(args={"fake_held": True})
        other = played.engine.submit("other", PROMPT, Sampling(max_tokens=4))
        played.step()
        played.tell("fault", generate="refuse")
        with pytest.raises(EngineError, match="not now"):
            played.engine.submit("a", PROMPT, Sampling()).result(60)
        played.tell("release")
        assert len(other.result(60).token_ids) == 4
        assert played.engine.stats()["restarts"] == 0

    def test_a_connection_that_is_cut_is_asked_for_the_rest(self, start: Start) -> None:
        played, handed = start(), list[int]()
        played.tell("fault", cut="now")
        future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30), lambda ids, *_: handed.extend(ids))
        generation = future.result(60)
        _, second = played.bodies()
        ids, limit = self.names
        assert second[ids] == PROMPT + generation.token_ids[:7].tolist()
        assert second["sampling_params"][limit] == 23
        assert generation.token_ids.tolist() == handed and len(handed) == 30
        assert played.engine.stats()["restarts"] == 0

    def test_cancelling_ends_it_at_the_server_too(self, start: Start) -> None:
        played = start(args={"fake_held": True})
        future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30))
        played.step(3)
        played.engine.cancel("a")
        assert len(future.result(60).token_ids) == 3
        played.until(lambda: any(how in ("aborted", "abort") for _, how, _ in played.asked("ended")))

    def test_the_load_of_the_server_is_read(self, start: Start) -> None:
        played = start(args={"fake_held": True})
        played.engine._keeper.limits = replace(played.engine._keeper.limits, watch_s=0.02)
        future = played.engine.submit("a", PROMPT, Sampling(max_tokens=30))
        played.step(3)
        played.until(lambda: played.engine.stats().get("server_running") == 1)
        stats = played.engine.stats()
        assert (stats["server_waiting"], stats["kv_usage"]) == (1, 0.25)
        played.tell("release")
        future.result(60)

    def test_tokens_that_arrive_late_stay_together_with_their_versions(self, start: Start, tensors: Tensors) -> None:
        """A thousand times at random: submitting, sampling, sending late, cancelling, swapping."""
        played, draw, version = start(**self.held), random.Random(5), 0
        engine = played.engine
        engine.load_weights(0, tensors).result(60)
        live: dict[str, tuple[Future[Generation], list[tuple[int, float, int]]]] = {}
        for number in range(1000):
            act = draw.choices(["submit", "step", "lag", "cancel", "swap"], [5, 5, 1, 2, 1])[0]
            if act == "submit" and len(live) < 12:
                handed: list[tuple[int, float, int]] = []
                prompt = [draw.randrange(3, 40) for _ in range(draw.randrange(1, 9))]
                future = engine.submit(
                    str(number), prompt, Sampling(max_tokens=draw.randrange(1, 40)),
                    lambda *columns, to=handed: to.extend(zip(*columns, strict=True)),
                )  # fmt: skip
                live[str(number)] = (future, handed)
            elif act == "step":
                played.tell("step", tokens=draw.randrange(1, 6), requests=0)
            elif act == "lag":
                played.tell("fault", lag=draw.randrange(4))
            elif act == "cancel" and live:
                engine.cancel(draw.choice(sorted(live)))
            elif act == "swap":
                version += 1
                engine.load_weights(version, tensors).result(60)
            for name in [name for name, (future, _) in live.items() if future.done()]:
                _check(*live.pop(name))
        played.tell("release")
        for future, handed in live.values():
            _check(future, handed)
        assert engine.stats()["restarts"] == 0

    # weights

    def test_weights_that_do_not_fit_change_nothing(self, start: Start, tensors: Tensors) -> None:
        engine = start().engine
        engine.load_weights(0, tensors).result(60)
        before = engine.effective_weights().result(60)
        missing = dict(list(tensors.items())[:-1])
        with pytest.raises(ModelError, match="are missing"):
            engine.load_weights(1, missing).result(60)
        assert engine.version == 0
        assert engine.effective_weights().result(60) == before

    def test_an_update_that_fails_is_made_up_for_by_another_life(self, start: Start, tensors: Tensors) -> None:
        for step in self.updates:
            for how in ("refuse", "die", "hang"):
                played = start(hang_s=1.0)
                played.engine.load_weights(0, tensors).result(60)
                played.tell("fault", **{step: how})
                assert played.engine.load_weights(1, changed(tensors)).result(60) == 1
                assert played.engine.stats()["restarts"] == 1
                assert played.engine.effective_weights().result(60).version == 1
                generation = played.engine.submit("a", PROMPT, Sampling(max_tokens=3)).result(60)
                assert set(generation.versions.tolist()) == {1}
                played.engine.close()

    # lives of a server

    def test_a_killed_server_comes_back_with_the_newest_weights_and_requests_go_on(
        self, start: Start, tensors: Tensors
    ) -> None:
        played = start(args={"fake_held": True})
        engine = played.engine
        engine.load_weights(0, tensors).result(60)
        engine.load_weights(1, changed(tensors)).result(60)
        before = engine.effective_weights().result(60)
        future = engine.submit("a", PROMPT, Sampling(max_tokens=20))
        played.step(5)
        played.kill()
        played.until_restarted()
        ((label,),) = played.asked("label")
        assert label["new_version"] == "1"
        played.step(3)
        engine.load_weights(2, changed(tensors)).result(60)
        played.tell("release")
        generation = future.result(60)
        assert generation.versions.tolist() == [1] * 8 + [2] * 12
        assert played.bodies()[0][self.names[0]] == PROMPT + generation.token_ids[:5].tolist()
        after = engine.effective_weights().result(60)
        assert (after.version, after.checksum) == (2, before.checksum)

    def test_a_server_that_samples_nothing_is_started_again(self, start: Start) -> None:
        played = start(args={"fake_held": True}, hang_s=0.5)
        played.engine._keeper.limits = replace(played.engine._keeper.limits, watch_s=0.02)
        future = played.engine.submit("a", PROMPT, Sampling(max_tokens=20))
        played.step(5)
        played.until_restarted()
        played.tell("release")
        assert len(future.result(60).token_ids) == 20

    def test_a_server_that_answers_no_more_is_started_again(self, start: Start) -> None:
        played = start()
        played.engine._keeper.limits = replace(played.engine._keeper.limits, watch_s=0.02, answer_s=0.2)
        played.engine._keeper.host.log_file.unlink()  # type: ignore[attr-defined] # they are cleared away at times
        played.tell("fault", hang="now")
        played.until_restarted()
        assert len(played.engine.submit("a", PROMPT, Sampling(max_tokens=20)).result(60).token_ids) == 20

    def test_a_server_that_dies_too_often_ends_the_engine_with_its_last_words(self, start: Start) -> None:
        played = start(args={"fake_held": True}, max_restarts=0)
        future = played.engine.submit("a", PROMPT, Sampling(max_tokens=20))
        played.step(5)
        ended_first: list[bool] = []
        future.add_done_callback(lambda _: ended_first.append(played.engine.ended.done()))
        played.kill()
        error = played.engine.ended.result(60)
        assert "SIGKILL" in str(error) and "give the host more memory" in error.fix
        assert "max_restarts=0" in str(future.exception(60)) and ended_first == [True]
        with pytest.raises(EngineError, match="max_restarts=0"):
            played.engine.submit("b", PROMPT, Sampling()).result(60)

    def test_a_server_that_does_not_start_says_why_and_what_to_do(self, start: Start) -> None:
        memory, killed = self.starts["memory"], ("the kernel ended it", "memory")
        for says, (rule, fix) in {**self.starts, "cause": memory, "killed": killed}.items():
            with pytest.raises(EngineError) as caught:
                start(args={"fake_says": says})
            assert rule in str(caught.value) and fix in caught.value.fix, says
            assert "astraflow-" in str(caught.value) and ".log" in str(caught.value), says

    def test_an_error_that_nobody_knows_is_shown_though_other_lines_follow_it(self, start: Start) -> None:
        with pytest.raises(EngineError, match=r"(?s)errors before them:\nOddError: 7 is odd\nlast lines of .*\nbye\n"):
            start(args={"fake_says": "odd"})

    def test_a_server_that_is_not_ready_in_time(self, start: Start) -> None:
        with pytest.raises(LaunchError, match=r"ready_s"):
            start(args={"fake_silent": True}, ready_s=0.7)

    def test_a_port_that_is_taken(self, start: Start, owner: Played) -> None:
        port = int(owner.url.rpartition(":")[2])
        with pytest.raises(EngineError, match=rf"engine.port={port} cannot be had"):
            start(port=port)

    def test_environments_that_cannot_serve(self, start: Start, tmp_path: Path) -> None:
        for found, message in [*self.environments, (None, "is no Python that runs")]:
            python = script(tmp_path / "python", f"echo '{json.dumps(found) if found else ''}'")
            with pytest.raises(EngineError, match=message):
                start(python=python)
        with pytest.raises(EngineError, match="is no Python that runs"):
            start(python=str(tmp_path / "nothing"))

    def test_arguments_that_are_not_free(self, start: Start) -> None:
        for name in self.ours:
            with pytest.raises(EngineError, match="is set by the engine itself"):
                start(args={name: "x"})

    def test_the_server_does_not_get_the_runs_token(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ASTRAFLOW_TOKEN", "secret-of-the-run")
        start()  # the fake ends at once where it has one

    def test_nothing_is_left_of_a_closed_engine(self, start: Start) -> None:
        engine = start().engine
        host: Any = engine._keeper.host
        process, files, written = host._process, engine._shadow.directory, host.log_file
        assert files.is_dir() and written.is_file()
        engine.close()
        assert process.returncode is not None and not files.exists() and not written.exists()

    def test_a_run_file_builds_it(self, python: str, endless_dir: Path) -> None:
        options = {
            "python": python, "dtype": "float32", "max_context": 64, "max_concurrency": 4, "threads": 1, "seed": 9,
        }  # fmt: skip
        with closing(build("engines", self.kind, options, "policies.p.engine", model_dir=endless_dir)) as engine:
            assert engine.max_context == 64

    # servers of somebody else

    def test_a_server_that_runs_already(
        self, owner: Played, attach: Callable[..., ServedEngine], tensors: Tensors
    ) -> None:
        owner.tell("pause")  # as a node leaves it that died within a swap
        engine = attach(url=owner.url)
        engine.load_weights(3, tensors).result(60)
        assert set(engine.submit("a", PROMPT, Sampling(max_tokens=3)).result(60).versions.tolist()) == {3}
        engine.close()
        assert owner.engine._keeper.host.ended() is None, "it is not ours to end"
        for about, message in self.abouts:
            owner.tell("fault", about=json.dumps(about))
            with pytest.raises(EngineError, match=message):
                attach(url=owner.url)
        owner.engine.close()
        with pytest.raises(LaunchError, match="gave no answer"):
            attach(url=owner.url, ready_s=0.3)

    def test_one_that_is_gone_ends_the_engine(self, owner: Played, attach: Callable[..., ServedEngine]) -> None:
        engine = attach(url=owner.url, ready_s=0.2)
        engine._keeper.limits = replace(engine._keeper.limits, watch_s=0.02)
        owner.engine.close()
        assert "max_restarts=3" in str(engine.ended.result(60))

    def test_several_servers_serve_as_one(
        self, start: Start, attach: Callable[..., ServedEngine], tensors: Tensors
    ) -> None:
        owners = [start(), start()]
        engine = attach(urls=[owner.url for owner in owners])
        engine.load_weights(3, tensors).result(60)
        futures = [engine.submit(str(number), PROMPT, Sampling(max_tokens=40)) for number in range(8)]
        assert {version for future in futures for version in future.result(60).versions.tolist()} == {3}
        assert all(owner.bodies() and len(owner.asked(self.updates[-1])) == 1 for owner in owners)

    def test_settings_that_cannot_be_together(self, attach: Callable[..., ServedEngine]) -> None:
        url = "http://127.0.0.1:9"
        with pytest.raises(EngineError, match=r"engine.url=.* cannot be with args, env or port"):
            attach(url=url, port=5)
        with pytest.raises(EngineError, match=r"engine.urls=.* cannot be with url"):
            attach(url=url, urls=[url])
        with pytest.raises(EngineError, match=r"engine.urls=.* cannot be with args, env or port"):
            attach(urls=[url], env={"A": "1"})
        for wrong in ("ftp://host", "host:8000", "http://"):
            with pytest.raises(EngineError, match=r"engine.url=.* must be http"):
                attach(url=wrong)
        with pytest.raises(EngineError, match=r"engine.port=99999 must be in"):
            attach(port=99999)
        with pytest.raises(LaunchError, match=rf"engine.url={url} gave no answer"):
            attach(urls=[url], ready_s=0.3)


def changed(tensors: Tensors) -> Tensors:
    return {name: tensor * 2 for name, tensor in tensors.items()}


def _check(future: Future[Generation], handed: list[tuple[int, float, int]]) -> None:
    generation = future.result(60)
    check_generation(generation)
    columns = (generation.token_ids, generation.logprobs, generation.versions)
    assert handed == list(zip(*(column.tolist() for column in columns), strict=True))
    assert np.all(generation.logprobs == -generation.token_ids / 64)


def check_lifeline(command: list[str], searched: str) -> None:
    """A server whose first line is the id of a child and its arguments ends with its child when its input closes."""
    with subprocess.Popen(
        [*command, "--port", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": searched}, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        child, _, rest = server.stdout.readline().decode().partition(" ")
        assert rest.strip() == "['--port', '1']"
        server.stdin.close()
        assert server.wait(60) == -signal.SIGKILL
        assert server.stdout.read() == b"", "its child has closed the pipe too"
    end = time.monotonic() + 60
    while time.monotonic() < end and _lives(int(child)):
        time.sleep(0.01)
    assert not _lives(int(child))


def _lives(pid: int) -> bool:
    """Zombies do not: nobody has waited for them yet."""
    state = Path(f"/proc/{pid}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
