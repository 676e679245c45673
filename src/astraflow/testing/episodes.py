"""Episodes of a run file without a model: the policies say what a test says. For tests of your own agent.

from astraflow.testing.episodes import RunFile

RUN = RunFile("run.toml")

def test_a_right_answer_is_worth_one():
    task = RUN.task("train", 0)
    assert RUN.play(task, actor=[task["answer"]]).reward == 1.0
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.load import load_run
from astraflow.config.rooms import build
from astraflow.errors import Problem
from astraflow.launch.checks import check_play
from astraflow.rollout.worker.client import LLM, BlockingLLM, Policies
from astraflow.types import Message, Outcome, Task
from astraflow.wire.swarm.outcome import outcome_of
from astraflow.workflows.load import build_workflow


class Called(msgspec.Struct):
    """A reply that calls a tool. Made by `calls`."""

    name: str
    arguments: dict[str, Any]


Said = str | Called
Says = Sequence[Said] | Callable[[list[Message]], Said]
"""The replies of a policy in order, or a function of the messages of a call."""


class Played(msgspec.Struct):
    """What an episode gave. `heard`: the messages of each call, by policy."""

    outcome: Outcome
    heard: dict[str, list[list[Message]]]

    @property
    def reward(self) -> Any:
        """As the workflow returned it: a number, numbers by policy, or None for unscored."""
        return self.outcome.reward


def calls(tool: str, /, **arguments: Any) -> Called:
    """A reply that calls `tool`."""
    return Called(tool, arguments)


class RunFile:
    """A run file, checked as `astraflow validate` does."""

    def __init__(self, path: str | Path, *overrides: str) -> None:
        """`overrides`: as on the command line, "--run.steps=3".

        Raises: AstraFlowError: everything that is wrong with it.
        """
        self.config = load_run(Path(path), overrides)
        self.num_rows = check_play(self.config)

    def task(self, source: str, row: int) -> Task:
        """A row of one of its sources."""
        spec = self.config.sources[source]
        return Task(source, row, 0, build("sources", spec.type, spec.options, f"sources.{source}").row(row))

    def play(self, task: Task, **says: Says) -> Played:
        """One episode of its workflow, in which each policy says what it is given.

        Raises: Problem: a policy is asked that has nothing (more) to say. What the workflow raises.
        """
        policies = sorted(self.config.policies)
        for name in says:
            if name not in policies:
                raise Problem("policy", name, "is not in the run file", f"give one of: {', '.join(policies)}")
        return asyncio.run(_play(build_workflow(self.config.workflow, policies), task, policies, says))


async def _play(play: Callable[..., Any], task: Task, policies: Sequence[str], says: dict[str, Says]) -> Played:
    heard: dict[str, list[list[Message]]] = {name: [] for name in policies}
    clients = {name: LLM(name, _answering(name, says.get(name, ()), heard[name]), "", "") for name in policies}
    target = play.func if isinstance(play, functools.partial) else play
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__):
        value = await play(task, Policies(clients))
    else:
        loop = asyncio.get_running_loop()
        blocking = Policies({name: BlockingLLM(client, loop) for name, client in clients.items()})
        value = await asyncio.to_thread(play, task, blocking)
    return Played(outcome_of(value), heard)


def _answering(name: str, says: Says, heard: list[list[Message]]) -> Any:
    async def ask(body: bytes) -> tuple[int, bytes]:
        messages = list(msgspec.json.decode(body)["messages"])
        place = len(heard)
        heard.append(messages)
        if not callable(says) and place >= len(says):
            raise Problem(f"calls of {name}", place + 1, f"are more than its {len(says)} replies", "give it more")
        said = says(messages) if callable(says) else says[place]
        return 200, msgspec.json.encode({"choices": [_choice(said, place)]})

    return ask


def _choice(said: Said, place: int) -> dict[str, Any]:
    if isinstance(said, str):
        return {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    function = {"name": said.name, "arguments": msgspec.json.encode(said.arguments).decode()}
    call = {"id": f"call_{place}_0", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"message": message, "finish_reason": "tool_calls"}
