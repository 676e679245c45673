"""An agent with tools that spawns sub-agents of itself, which share its environment and its budget."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM, Environment
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.load import factory
from astraflow.workflows.questions import guarded, user
from astraflow.workflows.roles import ByRoles, at_least

log = logging.getLogger("astraflow.workflow")
_TASKS = {"type": "array", "items": {"type": "string"}, "description": "One sub-task for each sub-agent."}
_SAID = "Start sub-agents that work on sub-tasks at once; gives what each of them said last."
_TAKES = {"type": "object", "properties": {"tasks": _TASKS}, "required": ["tasks"]}
SPAWN = {"type": "function", "function": {"name": "spawn", "description": _SAID, "parameters": _TAKES}}


class Recursive(ByRoles):
    """Agents are the policy under names of their places in the tree (`<policy>@0`, `@0.1`, ...); each sees only what
    its sub-agents said last. All share one environment, whose calls are made one after another, in an order that is
    logged (`astraflow.workflow`, DEBUG): what one agent takes from an inventory the next does not find. The score of
    the environment for the conversation of the root is the reward of all.
    """

    def __init__(
        self, *, environment: str | Mapping[str, Any], policy: str = "actor", max_depth: int = 2, max_breadth: int = 4,
        budget: int = 50,
    ) -> None:  # fmt: skip
        """`budget`: calls of the policy in an episode, of all agents together; when it is spent they all end."""
        super().__init__({"policy": policy})
        self._environment = factory("environments", environment, "workflow.environment")
        self.max_depth = at_least("max_depth", max_depth, 0, "use 0 for an agent without sub-agents")
        self.max_breadth = at_least("max_breadth", max_breadth, 1, "use max_depth = 0 for no sub-agents")
        self.budget = at_least("budget", budget, 1, "give the calls of all agents together")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        policy = self.roles["policy"]
        tree = _Tree(self, guarded(self._environment), llm[policy], policy)
        talk = await tree.play("0", guarded(tree.world.reset, task))
        outcome: Outcome = guarded(tree.world.score, talk)
        counts = {"agents": float(tree.num_agents), "actions": float(tree.num_actions), "calls": float(tree.num_calls)}
        return Outcome(reward=outcome.reward, metrics={**outcome.metrics, **counts})


class _Tree:
    """One episode."""

    def __init__(self, rules: Recursive, world: Environment, llm: LLM, policy: str) -> None:
        self._rules, self.world, self._llm, self._policy = rules, world, llm, policy
        self.num_agents = self.num_actions = self.num_calls = 0
        self._children: Counter[str] = Counter()  # place of an agent -> sub-agents that it has had

    async def play(self, place: str, talk: list[Message]) -> list[Message]:
        """The conversation of the agent at `place`, to its last reply or the end of the budget."""
        self.num_agents += 1
        spawning = place.count(".") < self._rules.max_depth
        tools = [*self.world.tools, *([SPAWN] if spawning else [])]
        while self.num_calls < self._rules.budget:
            self.num_calls += 1
            reply = await self._llm.chat(talk, tools=tools, model=f"{self._policy}@{place}")
            talk.append(reply.message)
            for call in reply.tool_calls:
                if call.name == "spawn" and spawning:
                    text: str | None = await self._spawn(place, call.arguments.get("tasks"))
                else:
                    text = self._act(place, call.name, call.arguments)
                if text is None:
                    return talk
                talk.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not reply.tool_calls:
                break
        return talk

    async def _spawn(self, place: str, tasks: Any) -> str:
        most = self._rules.max_breadth
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= most or not all(isinstance(t, str) for t in tasks):
            return f"spawn: tasks must be 1 to {most} texts"
        first = self._children[place]
        self._children[place] += len(tasks)
        talks = await asyncio.gather(*(self.play(f"{place}.{first + i}", [user(t)]) for i, t in enumerate(tasks)))
        return "\n".join(_last_words(talk) for talk in talks)

    def _act(self, place: str, name: str, arguments: Mapping[str, Any]) -> str | None:
        """All agents live on one event loop, and there is no pause within: that is the order."""
        self.num_actions += 1
        log.debug("action %d by agent %s: %s %s", self.num_actions, place, name, dict(arguments))
        text: str | None = guarded(self.world.call, name, arguments)
        return text


def _last_words(talk: list[Message]) -> str:
    replies = [m for m in talk if m["role"] == "assistant"]
    return str((replies[-1].get("content") if replies else None) or "(nothing)")
