"""An agent that spawns agents: one environment, limits of depth, breadth and budget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from astraflow.contracts import Environment
from astraflow.errors import EpisodeError, Problem
from astraflow.types import Action, Message, Step, Task
from team_table import QUESTION, built


class Store(Environment):
    """An inventory that agents share: the tool gives what is left to whoever asks first."""

    made: list[Store] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.left, self.taken = 3, []
        self.made.append(self)

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "take", "parameters": {"type": "object", "properties": {}}}}]

    def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "all"}]

    def step(self, action: Action) -> Step:
        if action.tool is None:
            return Step("", float(self.left == 0), done=True)
        if action.tool != "take":
            return Step(f"no {action.tool}")
        self.left -= self.left > 0
        self.taken.append(self.left)
        return Step(str(self.left))


class Tree:
    """A policy that says, agent by agent, what its script says. `asked`: (agent, number of messages, tools)."""

    def __init__(self, script: Mapping[str, Sequence[Any]]) -> None:
        self.script = {agent: list(replies) for agent, replies in script.items()}
        self.asked: list[tuple[str, int, list[str]]] = []

    async def chat(self, messages: Sequence[Message], **options: Any) -> Any:
        agent = options["model"].partition("@")[2]
        self.asked.append((agent, len(messages), [tool["function"]["name"] for tool in options["tools"]]))
        await asyncio.sleep(0)
        said = self.script[agent].pop(0)
        calls = [] if isinstance(said, str) else said
        asked = [SimpleNamespace(id=f"c{i}", name=name, arguments=given) for i, (name, given) in enumerate(calls)]
        content = said if isinstance(said, str) else ""
        message = {"role": "assistant", "content": content}
        return SimpleNamespace(message=message, content=content, tool_calls=asked, finish_reason="stop")


TAKE = ("take", {})


def tree_of(**limits: int) -> Any:
    return built("recursive", ["actor"], environment=f"{__name__}:Store", **limits)


async def test_sub_agents_share_the_inventory_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "astraflow.workflow")
    actor = Tree(
        {
            "0": [[("spawn", {"tasks": ["x", "y"]})], [("spawn", {"tasks": ["z"]})], "all"],
            "0.0": [[TAKE], "left"], "0.1": [[TAKE], "right"], "0.2": [[TAKE, TAKE], "more"],
        }
    )  # fmt: skip
    outcome = await tree_of()(QUESTION, {"actor": actor})
    assert outcome.reward == 1.0
    assert outcome.metrics == {
        "success": 1.0, "truncated": 0.0, "agents": 4.0, "actions": 4.0, "calls": 9.0,
    }  # fmt: skip
    assert Store.made[-1].taken == [2, 1, 0, 0], "the fourth finds nothing"
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [
        "action 1 by agent 0.0", "action 2 by agent 0.1", "action 3 by agent 0.2", "action 4 by agent 0.2",
    ]  # fmt: skip
    assert ("0.1", 1, ["take", "spawn"]) in actor.asked and ("0", 3, ["take", "spawn"]) in actor.asked


async def test_depth_and_breadth_are_limits_that_an_agent_is_told_of() -> None:
    spawn = ("spawn", {"tasks": ["x"]})
    actor = Tree(
        {
            "0": [[("spawn", {"tasks": ["x", "y", "z"]}), ("spawn", {}), spawn], "end"],
            "0.0": [[spawn], "so"],
        }
    )
    outcome = await tree_of(max_depth=1, max_breadth=2)(QUESTION, {"actor": actor})
    assert outcome.metrics["agents"] == 2.0
    assert [tools for agent, _, tools in actor.asked if agent == "0.0"] == [["take"], ["take"]]
    assert Store.made[-1].taken == [], "a spawn below the deepest level is a tool that the environment does not know"


async def test_the_budget_ends_all_agents_together() -> None:
    spawn = ("spawn", {"tasks": ["x", "y"]})
    actor = Tree({"0": [[spawn], "end"], "0.0": [[TAKE]] * 99, "0.1": [[TAKE]] * 99})
    outcome = await tree_of(budget=6)(QUESTION, {"actor": actor})
    assert outcome.metrics["calls"] == 6.0 == float(len(actor.asked))


class Ends(Store):
    def step(self, action: Action) -> Step:
        return Step("bye", 0.5, done=True) if action.tool == "give_up" else super().step(action)


async def test_after_the_end_nobody_is_spawned_and_nothing_is_done() -> None:
    actor = Tree({"0": [[("give_up", {}), TAKE, ("spawn", {"tasks": ["x", "y"]})]]})
    outcome = await built("recursive", ["actor"], environment=f"{__name__}:Ends")(QUESTION, {"actor": actor})
    assert outcome.metrics["agents"] == 1.0 == outcome.metrics["calls"]
    assert outcome.metrics["actions"] == 1.0 and outcome.reward == 0.5 and Store.made[-1].taken == []


class Falls(Store):
    def step(self, action: Action) -> Step:
        raise RuntimeError("no disk")


async def test_an_environment_that_raises_is_named() -> None:
    actor = Tree({"0": [[TAKE]]})
    with pytest.raises(EpisodeError, match=r"^env_error: step 1: RuntimeError: no disk"):
        await built("recursive", ["actor"], environment=f"{__name__}:Falls")(QUESTION, {"actor": actor})


def test_a_budget_of_nothing_is_refused_at_load() -> None:
    with pytest.raises(Problem, match="budget=0"):
        tree_of(budget=0)
