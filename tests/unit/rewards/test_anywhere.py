"""A grader gives the same on the main thread, in another thread, inside a running event loop and in another process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from astraflow.config.rooms import ROOMS
from graders import CASES, graded
from sandboxed import needs_sandbox


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not here: pip install 'astraflow[{extra}]'")


MARKS = {
    "code": needs_sandbox,
    "math": needs("math_verify", "math"),
    "reasoning_gym": needs("reasoning_gym", "reasoning-gym"),
}


def in_a_thread(name: str) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(graded(name))))
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_a_grader_gives_the_same_wherever_it_is_called(name: str) -> None:
    here = asyncio.run(graded(name))
    assert len({repr(verdict) for verdict in here}) > 1, "it tells no answers apart"

    async def on_a_running_loop() -> list[list[Any]]:
        return await asyncio.gather(graded(name), asyncio.to_thread(in_a_thread, name))

    assert [in_a_thread(name), *asyncio.run(on_a_running_loop())] == [here] * 3
    script = f"import asyncio, json; from graders import graded; print(json.dumps(asyncio.run(graded({name!r}))))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == here


def test_every_reward_is_here_but_the_one_that_asks_a_service() -> None:
    assert ROOMS["rewards"].keys() == CASES.keys() | {"judge"}
