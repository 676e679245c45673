"""A conversation with an environment's tools until the policy answers in plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError, Problem
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.load import choose_policy, factory
from astraflow.workflows.roles import ByRoles


class ToolUse(ByRoles):
    """Up to `max_turns` replies; after each that calls tools, their results are appended and the policy goes on.

    The environment scores the messages of the conversation, in which each reply also has its `finish_reason`.
    """

    def __init__(self, *, environment: str | Mapping[str, Any], max_turns: int = 4, policy: str | None = None) -> None:
        """`environment`: one fresh instance per episode. `policy`: who plays; needed with several policies."""
        if max_turns < 1:
            raise Problem("workflow.max_turns", max_turns, "must be >= 1", "use 2 for one tool call and an answer")
        super().__init__({"policy": policy} if policy is not None else {})
        self._environment = factory("environments", environment, "workflow.environment")
        self._max_turns, self._policy = max_turns, policy

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        client = choose_policy(llm, self._policy)
        try:
            world = self._environment()
            messages: list[Message] = list(world.reset(task))
            tools = world.tools
        except Exception as error:
            raise _failure(error) from error
        conversation = list(messages)
        for _ in range(self._max_turns):
            reply = await client.chat(messages, tools=tools)
            messages.append(reply.message)
            conversation.append({**reply.message, "finish_reason": reply.finish_reason})
            if not reply.tool_calls:
                break
            results = _run_tools(world, reply.tool_calls)
            messages += results
            conversation += results
            if len(results) < len(reply.tool_calls):
                break
        try:
            outcome = world.score(conversation)
        except Exception as error:
            raise _failure(error) from error
        if not isinstance(outcome, Outcome):
            raise EpisodeError(f"environment: score returned {type(outcome).__name__}, not an Outcome")
        return outcome


def _run_tools(world: Any, calls: Any) -> list[Message]:
    """One tool message per call, up to the first call for which the environment has none: there it ends."""
    results: list[Message] = []
    for call in calls:
        try:
            text = world.call(call.name, call.arguments)
        except Exception as error:
            raise _failure(error) from error
        if text is None:
            break
        results.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return results


def _failure(error: Exception) -> EpisodeError:
    return EpisodeError(f"environment: {type(error).__name__}: {error}")
