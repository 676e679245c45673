"""One question, one reply, one reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.load import choose_policy
from astraflow.workflows.questions import Questions, user
from astraflow.workflows.roles import ByRoles


class SingleTurn(ByRoles):
    """Ask `prompt` filled with the task's fields, grade the reply's text with `reward`."""

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        system: str | None = None,
        policy: str | None = None,
    ) -> None:
        """`prompt`: `{key}` is replaced by the task's field. `policy`: whom to ask; needed with several policies."""
        self._questions, self._policy = Questions(prompt, reward), policy
        super().__init__({"policy": policy} if policy is not None else {}, self._questions.fields)
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> float | Outcome | None:
        question = self._questions.ask(task)
        reply = await choose_policy(llm, self._policy).chat([*self._opening, user(question)])
        return await self._questions.outcome(reply.content or "", task)
