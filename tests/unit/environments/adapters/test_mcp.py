"""Tool servers of MCP: schemas as they are, warm servers, deadlines, faults, both transports."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="pip install 'astraflow[mcp]'")

import mcp_tools
from astraflow.environments.adapters.mcp.environment import Mcp
from astraflow.environments.adapters.mcp.servers import end_servers, servers_of
from astraflow.environments.worlds import World, Worlds
from astraflow.errors import EpisodeError, Problem
from astraflow.testing.environments.suite import check_environment
from astraflow.types import Action, Step, Task
from recorded import recorded

COMMAND = [sys.executable, str(Path(mcp_tools.__file__))]
TASK = Task("t", 0, 0, {"question": "2+3?", "answer": "5"})
SPEC: dict[str, Any] = {"type": "mcp", "command": COMMAND, "reward": "exact"}


@pytest.fixture(autouse=True)
async def no_server_stays() -> AsyncIterator[None]:
    yield
    await end_servers()


def tool(name: str, **arguments: Any) -> Action:
    return Action(tool=name, arguments=arguments)


async def opened(worlds: Worlds) -> World:
    world = worlds.open()
    await world.reset(TASK)
    return world


async def test_tools_are_those_of_the_server_and_an_answer_is_graded() -> None:
    world = Worlds({**SPEC, "system": "Use tools."}).open()
    assert await world.reset(TASK) == (
        [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "2+3?"}], 0
    )  # fmt: skip
    add = world.tools[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Add two numbers.")
    assert add["parameters"]["required"] == ["a", "b"] and add["parameters"]["properties"]["a"]["type"] == "integer"
    assert await world.step(tool("add", a=2, b=3)) == Step("5")
    assert await world.step(Action(text="5")) == Step("", 1.0, True)
    await world.close()


async def test_what_a_policy_does_wrong_is_told() -> None:
    world = await opened(Worlds(SPEC))
    assert (await world.step(tool("sub", a=1))).text == "There is no tool sub. There are: add, fault, whoami."
    wrong = await world.step(tool("add", a="two"))
    assert "rror" in wrong.text and wrong.metrics == {"tool_errors": 1.0}
    raised = await world.step(tool("fault", kind="raise"))
    assert "rror" in raised.text and raised.metrics == {"tool_errors": 1.0}
    flood = await world.step(tool("fault", kind="flood"))
    assert len(flood.text) < 10_100 and flood.text.endswith("[40000 more characters]")
    await world.close()


@pytest.mark.parametrize(
    ("kind", "error"), [("hang", r"^env_timeout: tool fault gave nothing in 0\.5 s"), ("crash", r"^env_error: the mcp")]
)
async def test_a_server_that_hangs_or_ends_is_replaced(kind: str, error: str) -> None:
    worlds = Worlds({**SPEC, "call_s": 0.5})
    world = await opened(worlds)
    with pytest.raises(EpisodeError, match=error):
        await world.step(tool("fault", kind=kind))
    await world.close()
    after = await opened(worlds)
    assert (await after.step(tool("add", a=1, b=1))).text == "2"
    await after.close()


async def whoami(world: World, word: str) -> tuple[str, str]:
    pid, _, seen = (await world.step(tool("whoami", word=word))).text.partition(" ")
    return pid, seen


async def test_servers_stay_warm_and_are_shared_unless_an_episode_wants_its_own() -> None:
    shared = Worlds(SPEC)
    one, two = await opened(shared), await opened(shared)
    assert (await whoami(one, "a"))[0] == (await whoami(two, "b"))[0]
    await one.close()
    await two.close()
    own = Worlds({**SPEC, "share": False, "servers": 2, "recycle_after": 1})
    one, two = await opened(own), await opened(own)
    first, _ = await whoami(one, "a")
    assert first != (await whoami(two, "b"))[0]
    waiting = asyncio.ensure_future(opened(own))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "both are taken"
    await one.close()
    third = await waiting
    assert await whoami(third, "c") != first and (await whoami(third, "d"))[1] == "c d", "a fresh one"
    await two.close()
    await third.close()


async def test_a_program_that_is_no_server_is_told() -> None:
    world = Worlds({**SPEC, "command": [sys.executable, "-c", "print('hello')"], "start_s": 20.0}).open()
    with pytest.raises(EpisodeError, match=r"^env_"):
        await world.reset(TASK)
    await world.close()
    world = Worlds({**SPEC, "command": ["/no/such/program"]}).open()
    with pytest.raises(EpisodeError, match=r"^env_error: the mcp server does not start"):
        await world.reset(TASK)
    await world.close()


WORKER = """
import asyncio
from test_mcp import SPEC, Worlds, opened, tool, whoami

async def hang():
    world = await opened(Worlds(SPEC))
    pid, _ = await whoami(world, "")
    hangs = asyncio.create_task(world.step(tool("fault", kind="hang")))
    await asyncio.sleep(1.0)  # it has the call
    print(pid, flush=True)
    await hangs

asyncio.run(hang())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the tie is made by Linux")
def test_a_server_that_hangs_ends_with_a_worker_that_is_killed() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        server = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    psutil.wait_procs([server], timeout=20)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


async def test_streamable_http(url: str) -> None:
    worlds = Worlds({"type": "mcp", "url": url, "reward": "exact"})
    for _ in range(200):
        world = worlds.open()
        try:
            await world.reset(TASK)
            break
        except EpisodeError:  # it starts yet
            await world.close()
            await asyncio.sleep(0.1)
    assert (await world.step(tool("add", a=2, b=3))).text == "5"
    assert (await world.step(Action(text="6"))).reward == 0.0
    await world.close()
    assert "kills 0" in servers_of(Mcp(url=url, reward="exact")._settings).line()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward": "exact"}, ["mcp.command", "mcp.url must be given"]),
        ({"reward": "exact", "command": ["x"], "url": "http://x"}, ["not both"]),
        ({"reward": "exakt", "command": ["x"]}, ["workflow.environment.reward", "exakt"]),
        ({"reward": "exact", "command": ["x"], "servers": 0}, ["mcp.servers=0"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Problem) as caught:
        Mcp(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_oracle_and_null() -> None:
    def oracle(task: Task, told: list[Step], chance: Any) -> Action | str:
        a, b = task["question"][:-1].split("+")
        return tool("add", a=int(a), b=int(b)) if len(told) == 1 else told[-1].text

    spec = {**SPEC, "command": [*COMMAND, "pure"]}
    tasks = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(2, 5) for b in range(3, 6)]
    report = check_environment(spec, tasks, oracle=oracle, actions=[str(n) for n in range(5, 11)], max_turns=3)
    recorded("`mcp`, a tool that adds", "9", oracle=report.oracle, null=report.null, random=report.random)
