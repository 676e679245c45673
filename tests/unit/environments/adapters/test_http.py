"""An environment over HTTP against the reference server: the same as here, retries, deadlines, strangers, garbage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from astraflow.environments.worlds import Worlds
from astraflow.errors import EpisodeError, Problem
from astraflow.testing.environments.served import EnvironmentService, Served
from astraflow.testing.environments.suite import check_environment
from astraflow.types import Action, Step, Task
from astraflow.wire.streams import web
from recorded import recorded
from world_samples import Counter

TASK = Task("t", 0, 0, {"start": 0})


class Faulty:
    """Stands before a service: loses answers after they were made, answers 503, hangs, or says garbage."""

    def __init__(self, app: Any, *faults: str) -> None:
        self.app, self.faults, self.requests = app, list(faults), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        self.requests += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lose":
            await self.app(scope, receive, self._nowhere)
            fault = "502"  # of whatever stands between
        if fault == "hang":
            await asyncio.sleep(600)
        if fault:
            text = {"garbage": '{"text": 7}', "flood": " " * 2000}.get(fault, "no")
            return await Response(text, int(fault) if fault.isdigit() else 200)(scope, receive, send)
        await self.app(scope, receive, send)

    async def _nowhere(self, message: Any) -> None:
        return None


@contextmanager
def served(*faults: str, spec: Any = "world_samples:Counter", token: str = "", **options: Any) -> Iterator[Any]:
    faulty = Faulty(EnvironmentService(spec, token=token).app, *faults)
    with Served(faulty) as url:
        yield Worlds({"type": "http", "url": url, **options}, env_timeout_s=20.0), faulty


def test_it_is_an_environment_as_any_other() -> None:
    with Served(EnvironmentService("world_samples:Counter").app) as url:
        tasks = [{"start": 0}, {"start": 1}]
        report = check_environment(
            {"type": "http", "url": url}, tasks, oracle=lambda task, told, chance: str(int(told[-1].text[:-1]) + 1),
            actions=["1", "2", "3"],
        )  # fmt: skip
    recorded("`http`, a counter", "2", oracle=report.oracle, null=report.null, random=report.random)
    assert report == check_environment(
        "world_samples:Counter", tasks, oracle=lambda task, told, chance: str(int(told[-1].text[:-1]) + 1),
        actions=["1", "2", "3"],
    )  # fmt: skip


@pytest.mark.parametrize("fault", ["lose", "503", "429"])
async def test_a_request_is_tried_again_and_a_step_is_made_once(fault: str) -> None:
    with served("", fault, fault) as (worlds, faulty):
        world = worlds.open()
        assert await world.reset(TASK) == ([{"role": "user", "content": "0?"}], 0)
        assert await world.step(Action(text="1")) == Step("1?", 0.0, False, {"reached": 1.0})
        assert await world.step(Action(text="2")) == Step("2?", 0.0, False, {"reached": 2.0})
        await world.close()
        assert faulty.requests == 1 + 3 + 1 + 1


@pytest.mark.parametrize(
    ("faults", "options", "error"),
    [
        (["500"], {}, r"^env_error: http://.*/episodes/\w+ answered 500: no$"),
        (["503"] * 2, {"retries": 1}, r"^env_error: .* answered 503"),
        (["garbage"], {}, r"^env_error: .* is no Opening .*\$\.text"),
        (["302"], {}, r"^env_error: .* answered 302: no"),
        (["flood"], {"retries": 0}, r"^env_error: .* sent an answer of more than 1000 bytes"),
        (["hang"], {"try_s": 0.2, "retries": 0}, r"^env_error: .* gave no answer within 0\.2 s"),
    ],
)
async def test_what_stays_wrong_is_a_failure_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, faults: list[str], options: dict[str, Any], error: str
) -> None:
    monkeypatch.setattr(web, "MAX_BODY_BYTES", 1000)
    with served(*faults, **options) as (worlds, _):
        world = worlds.open()
        with pytest.raises(EpisodeError, match=error):
            await world.reset(TASK)
        await world.close()


async def test_the_deadline_of_a_step_is_over_all_tries() -> None:
    with served("", "hang", spec="world_samples:Counter") as (worlds, _):
        worlds._timeout_s = 0.3
        world = worlds.open()
        await world.reset(TASK)
        with pytest.raises(EpisodeError, match=r"^env_timeout: step 1 of http"):
            await world.step(Action(text="1"))


async def test_a_failure_inside_the_service_is_told() -> None:
    with served(spec=f"{__name__}:Broken") as (worlds, _):
        world = worlds.open()
        await world.reset(TASK)
        with pytest.raises(EpisodeError, match=r"env_error: .*answered 500.*env_error: step 1: RuntimeError: no disk"):
            await world.step(Action(text="1"))


async def test_a_stranger_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(token="s3cret") as (worlds, _), pytest.raises(EpisodeError, match="answered 401"):
        await worlds.open().reset(TASK)
    monkeypatch.setenv("THEIR_TOKEN", "s3cret")
    with served(token="s3cret", token_env="THEIR_TOKEN") as (worlds, _):
        assert (await worlds.open().reset(TASK))[0][0]["content"] == "0?"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:8000"}, ["http.url=localhost:8000", "http://host:port"]),
        ({"url": "http://x", "token_env": "NO_SUCH_VARIABLE"}, ["NO_SUCH_VARIABLE", "is not set"]),
        ({"url": "http://x", "retries": -1}, ["retries=-1"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Problem) as caught:
        Worlds({"type": "http", **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Broken(Counter):
    def step(self, action: Action) -> Step:
        raise RuntimeError("no disk")
