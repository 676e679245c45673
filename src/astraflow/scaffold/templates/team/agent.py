"""A team: an actor answers, a verifier says whether that is right. Each is a policy and earns a reward of its own."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.contracts import LLM
from astraflow.types import Task


async def solve(task: Task, llm: Mapping[str, LLM]) -> dict[str, float]:
    """The reward of each policy. One that is not asked in an episode gets none, and is left out."""
    question = task["question"]
    answer = await llm["actor"].chat([{"role": "user", "content": question}])
    right = answer.content.strip() == task["answer"]
    verdict = await llm["verifier"].chat([{"role": "user", "content": f"{question}{answer.content}="}])
    return {"actor": float(right), "verifier": float(verdict.content.strip() == ("y" if right else "n"))}
