"""A workflow that lives with the clients of the swarm; a node that has it can play nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError
from astraflow.types import Task


class Elsewhere:
    """`type = "swarm"`."""

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> float:
        raise EpisodeError("workflow: it lives with the clients of the swarm; play it there")
