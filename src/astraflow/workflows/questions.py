"""Questions that tasks ask, graded answers, and short ways to ask a policy."""

from __future__ import annotations

import inspect
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError, Problem, place_of
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.load import reward_function


class Grade(NamedTuple):
    """What a reward function says of one answer."""

    reward: float | None  # None: unscored
    success: float  # 0 or 1


class Questions:
    """The question that a task asks, and the reward function that grades answers to it."""

    def __init__(self, prompt: str, reward: str | Mapping[str, Any]) -> None:
        """`prompt`: `{key}` is replaced by the task's field. Raises: Problem: no template, or it names no field."""
        self._prompt, self._reward = prompt, reward_function(reward)
        self.fields = fields_of(prompt)

    def ask(self, task: Task) -> str:
        """The question. Raises: EpisodeError: the task lacks a field."""
        try:
            return self._prompt.format_map(task.fields)
        except (KeyError, IndexError, AttributeError) as error:
            known = ", ".join(map(str, task.fields))
            raise EpisodeError(f"task: workflow.prompt needs the field {error}; the task has {known}") from error

    async def outcome(self, answer: str, task: Task) -> float | Outcome | None:
        """What the reward function says. Raises: EpisodeError: it raised."""
        try:
            said = self._reward(answer, task)
            return await said if inspect.isawaitable(said) else said
        except Exception as error:
            raise EpisodeError(f"reward: {type(error).__name__}: {error}{place_of(error)}") from error

    async def grade(self, answer: str, task: Task) -> Grade:
        """The same as two numbers. Raises: EpisodeError: also for rewards by policy, which only a workflow can give."""
        said = await self.outcome(answer, task)
        if not isinstance(said, Outcome):
            return Grade(said, float(said is not None and said >= 1))
        if isinstance(said.reward, dict):
            raise EpisodeError(f"reward: {said.reward} must be a number or None; the workflow says whose it is")
        success = said.reward is not None and said.reward >= 1
        return Grade(said.reward, said.metrics.get("success", float(success)))


def fields_of(prompt: str) -> tuple[str, ...]:
    """The task fields that `prompt` needs. Raises: Problem: no template, or it names no field."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None]
    except ValueError as error:
        raise Problem("workflow.prompt", prompt, f"is not a template ({error})", "write a brace as {{ or }}") from error
    if not names or "" in names:
        raise Problem("workflow.prompt", prompt, "names no field of the task", 'write for example "{question}"')
    return tuple(names)


def user(text: str) -> Message:
    """A message of role "user"."""
    return {"role": "user", "content": text}


async def said(llm: LLM, text: str, **options: Any) -> str:
    """The text of the reply to one question."""
    return str((await llm.chat([user(text)], **options)).content or "").strip()


def together(team: float | None, own: float) -> float | None:
    """Unscored when the team is."""
    return None if team is None else own
