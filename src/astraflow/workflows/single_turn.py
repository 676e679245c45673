"""One question, one reply, one reward."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError, Problem
from astraflow.types import Outcome, Task
from astraflow.workflows.load import choose_policy, reward_function


class SingleTurn:
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
        self._reward = reward_function(reward)
        self._prompt, self._policy = prompt, policy
        self._opening = [{"role": "system", "content": system}] if system else []
        self.fields = _fields(prompt)

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> float | Outcome | None:
        try:
            question = self._prompt.format_map(task.fields)
        except (KeyError, IndexError, AttributeError) as error:
            known = ", ".join(map(str, task.fields))
            raise EpisodeError(f"task: workflow.prompt needs the field {error}; the task has {known}") from error
        reply = await choose_policy(llm, self._policy).chat([*self._opening, {"role": "user", "content": question}])
        try:
            return self._reward(reply.content or "", task)
        except Exception as error:
            raise EpisodeError(f"reward: {type(error).__name__}: {error}") from error


def _fields(prompt: str) -> tuple[str, ...]:
    """The task fields that `prompt` needs."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise Problem("workflow.prompt", prompt, f"is not a template ({error})", "write a brace as {{ or }}") from error
    if not names or "" in names:
        raise Problem("workflow.prompt", prompt, "names no field of the task", 'write for example "{question}"')
    return tuple(names)
