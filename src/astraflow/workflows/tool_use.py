"""A policy in an environment: it calls tools, or acts by what it says, until the environment is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.environments.worlds import ENV_TIMEOUT_S, World, Worlds
from astraflow.errors import EpisodeError
from astraflow.types import Message, Outcome, Task, error_kind
from astraflow.workflows.load import choose_policy
from astraflow.workflows.roles import ByRoles, at_least
from astraflow.workflows.tally import Budget, Tally, actions_of


class ToolUse(ByRoles):
    """Each reply is one action for each tool that it calls, else one of its text; what they give is appended.

    A budget that is spent ends the episode, with the rewards so far: replies, sampled tokens, seconds (looked at
    between replies), and the context of the model.
    """

    def __init__(
        self, *, environment: str | Mapping[str, Any], max_turns: int = 4, max_sampled_tokens: int = 0,
        max_context_tokens: int = 0, max_wall_s: float = 0.0, env_timeout_s: float = ENV_TIMEOUT_S,
        pool: Mapping[str, Any] | None = None, policy: str | None = None,
    ) -> None:  # fmt: skip
        """`environment`: a fresh one per episode. `max_...`: 0: no such limit. `env_timeout_s`: deadline of each of its
        steps. `pool`: its processes, if it runs as "cpu". `policy`: who plays; needed with several policies."""
        super().__init__({"policy": policy} if policy is not None else {})
        at_least("max_turns", max_turns, 1, "use 2 for one tool call and an answer")
        at_least("max_sampled_tokens", max_sampled_tokens, 0, "use 0 for no limit")
        at_least("max_context_tokens", max_context_tokens, 0, "use 0 for no limit")
        at_least("max_wall_s", max_wall_s, 0, "use 0 for no limit")
        self._limits = (max_turns, max_sampled_tokens, max_wall_s, max_context_tokens)
        self._worlds, self._policy = Worlds(environment, env_timeout_s=env_timeout_s, pool=pool), policy

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        world = self._worlds.open()
        try:
            return await self._play(task, world, choose_policy(llm, self._policy))
        finally:
            await world.close()

    async def _play(self, task: Task, world: World, client: LLM) -> Outcome:
        tally, budget = Tally(), Budget(*self._limits)
        messages, _ = await world.reset(task)
        options = self._options(world)
        while not tally.done and not budget.spent:
            try:
                reply = await client.chat(messages, **options, **budget.options())
            except EpisodeError as error:
                if error_kind(str(error)) == "overlong" and tally.turns:
                    break
                raise
            budget.replied(reply.usage)
            messages.append(reply.message)
            messages += await self._act(world, tally, reply)
        return tally.outcome(self._policy)

    def _options(self, world: World) -> dict[str, Any]:
        """Of each call."""
        return {"tools": world.tools} if world.tools else {}

    async def _act(self, world: World, tally: Tally, reply: Any) -> list[Message]:
        """What a reply does, and the messages that tell what came of it."""
        results: list[Message] = []
        for action, call_id in actions_of(reply, tally.turn()):
            step = await world.step(action)
            tally.add(step)
            if step.done:
                break
            results.append(told(step.text, call_id))
        return results


def told(text: str, call_id: str | None) -> Message:
    """The message that tells what came of an action: the result of a tool call, or what comes next."""
    if call_id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": call_id, "content": text}
