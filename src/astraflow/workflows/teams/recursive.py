"""An agent with tools that spawns sub-agents of itself, which share its environment and its budget."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
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
_TASKS = {"type": "array", "items": {"type": "string"}, "description": "One sub-task for each sub-agent."}
_SAID = "Start sub-agents that work on sub-tasks at once; gives what each of them said last."
_TAKES = {"type": "object", "properties": {"tasks": _TASKS}, "required": ["tasks"]}
SPAWN = {"type": "function", "function": {"name": "spawn", "description": _SAID, "parameters": _TAKES}}


class Recursive(ByRoles):
    """Agents are the policy under names of their places in the tree (`<policy>@0`, `@0.1`, ...); each sees only what
    its sub-agents said last. All share one environment, whose steps are made one after another, in an order that is
    logged (`astraflow.workflow`, DEBUG): what one agent takes from an inventory the next does not find. What the steps
    of all agents earn is the reward of all. What the root says without calling a tool is a step, too; what a sub-agent
    says so is its result.
    """

    def __init__(
        self, *, environment: str | Mapping[str, Any], policy: str = "actor", max_depth: int = 2, max_breadth: int = 4,
        budget: int = 50, env_timeout_s: float = ENV_TIMEOUT_S, pool: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`budget`: calls of the policy in an episode, of all agents together; when it is spent they all end.
        `env_timeout_s`, `pool`: as of `tool_use`."""
        super().__init__({"policy": policy})
        self._worlds = Worlds(environment, env_timeout_s=env_timeout_s, pool=pool)
        self.max_depth = at_least("max_depth", max_depth, 0, "use 0 for an agent without sub-agents")
        self.max_breadth = at_least("max_breadth", max_breadth, 1, "use max_depth = 0 for no sub-agents")
        self.budget = at_least("budget", budget, 1, "give the calls of all agents together")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        policy = self.roles["policy"]
        world = self._worlds.open()
        try:
            opening, _ = await world.reset(task)
            tree = _Tree(self, world, llm[policy], policy)
            await tree.play("0", opening)
        finally:
            await world.close()
        outcome = tree.tally.outcome()
        del outcome.metrics["turns"]
        counts = {"agents": float(tree.num_agents), "actions": float(tree.num_actions), "calls": float(tree.num_calls)}
        return Outcome(reward=outcome.reward, metrics={**outcome.metrics, **counts})


class _Tree:
    """One episode."""

    def __init__(self, rules: Recursive, world: World, llm: LLM, policy: str) -> None:
        self._rules, self._world, self._llm, self._policy = rules, world, llm, policy
        self.num_agents = self.num_actions = self.num_calls = 0
        self.tally = Tally()
        self._children: Counter[str] = Counter()  # place of an agent -> sub-agents that it has had
        self._turn = asyncio.Lock()  # who comes first acts first

    async def play(self, place: str, talk: list[Message]) -> list[Message]:
        """The conversation of the agent at `place`, to its last reply, the end of the budget or of the episode."""
        self.num_agents += 1
        spawning = place.count(".") < self._rules.max_depth
        tools = [*self._world.tools, *([SPAWN] if spawning else [])]
        turn = 0
        while self.num_calls < self._rules.budget and not self.tally.done:
            self.num_calls += 1
            turn += 1
            reply = await self._llm.chat(talk, tools=tools, model=f"{self._policy}@{place}")
            talk.append(reply.message)
            if not reply.tool_calls and place != "0":
                break
            for action, call_id in actions_of(reply, turn):
                if action.tool == "spawn" and spawning:
                    text: str | None = await self._spawn(place, action.arguments.get("tasks"))
                else:
                    text = await self._act(place, action)
                if text is None:
                    return talk
                talk.append(told(text, call_id))
        return talk

    async def _spawn(self, place: str, tasks: Any) -> str:
        most = self._rules.max_breadth
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= most or not all(isinstance(t, str) for t in tasks):
            return f"spawn: tasks must be 1 to {most} texts"
        first = self._children[place]
        self._children[place] += len(tasks)
        talks = await asyncio.gather(*(self.play(f"{place}.{first + i}", [user(t)]) for i, t in enumerate(tasks)))
        return "\n".join(_last_words(talk) for talk in talks)

    async def _act(self, place: str, action: Action) -> str | None:
        """What the environment tells the agent; None: the episode is over."""
        async with self._turn:
            if self.tally.done:
                return None
            if action.tool is not None:
                self.num_actions += 1
                what = f"{action.tool} {action.arguments}"
                log.debug("action %d by agent %s: %s", self.num_actions, place, what)
            self.tally.turn()
            step = await self._world.step(action)
            self.tally.add(step)
            return None if step.done else step.text


def _last_words(talk: list[Message]) -> str:
    replies = [m for m in talk if m["role"] == "assistant"]
    return str((replies[-1].get("content") if replies else None) or "(nothing)")
