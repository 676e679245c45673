"""An agent with tools that spawns sub-agents of itself, which share its environment and its budget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.environments.worlds import ENV_TIMEOUT_S, World, Worlds
from astraflow.types import Action, Message, Outcome, Task
from astraflow.workflows.questions import user
from astraflow.workflows.roles import ByRoles, at_least
from astraflow.workflows.tally import Tally, actions_of
from astraflow.workflows.tool_use import told

log = logging.getLogger("astraflow.workflow")
_SAID = "Start sub-agents at once, one for each sub-task; gives what each of them said last."
_TEXTS = {"tasks": {"type": "array", "items": {"type": "string"}}}
_TAKES = {"type": "object", "properties": _TEXTS, "required": ["tasks"]}
SPAWN = {"type": "function", "function": {"name": "spawn", "description": _SAID, "parameters": _TAKES}}


class Recursive(ByRoles):
    """Agents are the policy under names of their places in the tree (`<policy>@0`, `@0.1`, ...); each sees only what
    its sub-agents said last. All share one environment, whose steps are made and logged (`astraflow.workflow`, DEBUG)
    one after another: what one agent takes from an inventory the next does not find. What the steps of all earn is the
    reward of all. What the root says without a tool call is a step, too; what a sub-agent says so is its result."""

    def __init__(
        self, *, environment: str | Mapping[str, Any], policy: str = "actor", max_depth: int = 2, max_breadth: int = 4,
        budget: int = 50, env_timeout_s: float = ENV_TIMEOUT_S, pool: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`budget`: calls of all agents together, then they all end. `env_timeout_s`, `pool`: as of `tool_use`."""
        super().__init__({"policy": policy})
        self._worlds = Worlds(environment, env_timeout_s=env_timeout_s, pool=pool)
        self.max_depth = at_least("max_depth", max_depth, 0, "use 0 for an agent without sub-agents")
        self.max_breadth = at_least("max_breadth", max_breadth, 1, "use max_depth = 0 for no sub-agents")
        self.budget = at_least("budget", budget, 1, "give the calls of all agents together")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        world = self._worlds.open()
        try:
            talk, _ = await world.reset(task)
            tree = _Tree(self, world, llm[self.roles["policy"]])
            await tree.play("0", talk)
        finally:
            await world.close()
        outcome = tree.tally.outcome()
        del outcome.metrics["turns"]
        return Outcome(reward=outcome.reward, metrics={**outcome.metrics, **tree.counts})


class _Tree:
    """One episode. `counts`: agents, actions by tools, calls of the policy."""

    def __init__(self, rules: Recursive, world: World, llm: LLM) -> None:
        self._rules, self._world, self._llm, self._policy = rules, world, llm, rules.roles["policy"]
        self.tally, self.counts = Tally(), {"agents": 0.0, "actions": 0.0, "calls": 0.0}
        self._children: dict[str, int] = {}  # place of an agent -> sub-agents that it has had
        self._turn = asyncio.Lock()  # who comes first acts first

    async def play(self, place: str, talk: list[Message]) -> str:
        """What the agent at `place` says last: it is done, or the budget is spent, or the episode is over."""
        self.counts["agents"] += not self.tally.done  # else it never begins
        spawning, said, turn = place.count(".") < self._rules.max_depth, "", 0
        tools = [*self._world.tools, *([SPAWN] if spawning else [])]
        while self.counts["calls"] < self._rules.budget and not self.tally.done:
            self.counts["calls"] += 1
            turn += 1
            reply = await self._llm.chat(talk, tools=tools, model=f"{self._policy}@{place}")
            talk, said = [*talk, reply.message], reply.content
            if not reply.tool_calls and place != "0":
                break
            for action, call_id in actions_of(reply, turn):
                text = await (self._spawn if spawning and action.tool == "spawn" else self._act)(place, action)
                talk.append(told(text, call_id))
        return said or "(nothing)"

    async def _spawn(self, place: str, action: Action) -> str:
        most, tasks = self._rules.max_breadth, action.arguments.get("tasks")
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= most or not all(isinstance(t, str) for t in tasks):
            return f"spawn: tasks must be 1 to {most} texts"
        first = self._children.get(place, 0)
        self._children[place] = first + len(tasks)
        agents = (self.play(f"{place}.{first + i}", [user(text)]) for i, text in enumerate(tasks))
        return "\n".join(await asyncio.gather(*agents))

    async def _act(self, place: str, action: Action) -> str:
        async with self._turn:
            if self.tally.done:
                return ""
            if action.tool is not None:
                self.counts["actions"] += 1
                log.debug("action %d by agent %s: %s %s", self.counts["actions"], place, action.tool, action.arguments)
            self.tally.turn()
            step = await self._world.step(action)
            self.tally.add(step)
            return step.text
