"""The agent: it plays one task with the policy, and returns how well that went."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.contracts import LLM
from astraflow.types import Task


async def solve(task: Task, llm: Mapping[str, LLM], *, prompt: str = "{question}") -> float:
    """`prompt` is a setting of [workflow]; so is every other parameter that you add."""
    question = prompt.format(question=task["question"])
    reply = await llm["actor"].chat([{"role": "user", "content": question}])
    return grade(reply.content, task["answer"])


def grade(said: str, answer: str) -> float:
    """The reward, 0 to 1."""
    return float(said.strip() == answer)
