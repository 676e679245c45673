"""A solver answers several times, a selector says which answer is the best."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.types import Outcome, Task
from astraflow.workflows.questions import Questions, said
from astraflow.workflows.roles import ByRoles, at_least

_NUMBER = re.compile(r"\d+")


class SolverSelector(ByRoles):
    """`candidates` answers at once, numbered from 1; the first number that the selector says is its choice.

    The selector earns the grade of its choice, 0 without one. The solver earns the mean grade of its answers, and each
    answer its own (agents `<solver>@1`, `@2`, ...; see `per_call`).
    """

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        select: str = "{question}\n{answers}\nWhich answer is right? Say its number.",
        candidates: int = 4,
        solver: str = "solver",
        selector: str = "selector",
    ) -> None:
        """`select`: what the selector is asked, with `{question}` and `{answers}`, one a line: `1) ...`."""
        self._questions = Questions(prompt, reward)
        super().__init__({"solver": solver, "selector": selector}, self._questions.fields)
        self._select = select
        self._candidates = at_least("candidates", candidates, 2, "with one there is nothing to select")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        solver, selector = self.roles["solver"], self.roles["selector"]
        question = self._questions.ask(task)
        agents = [f"{solver}@{number}" for number in range(1, self._candidates + 1)]
        answers = await asyncio.gather(*(said(llm[solver], question, model=agent) for agent in agents))
        grades = await asyncio.gather(*(self._questions.grade(answer, task) for answer in answers))
        listed = "\n".join(f"{number}) {answer}" for number, answer in enumerate(answers, 1))
        asked = self._select.replace("{question}", question).replace("{answers}", listed)
        found = _NUMBER.search(await said(llm[selector], asked))
        place = int(found[0]) if found is not None else 0
        chosen = grades[place - 1] if 1 <= place <= len(grades) else None
        if any(grade.reward is None for grade in grades):
            return Outcome()
        rewards: dict[str, float | None] = dict(zip(agents, (grade.reward for grade in grades), strict=True))
        rewards[selector] = chosen.reward if chosen is not None else 0.0
        success = chosen.success if chosen is not None else 0.0
        best = max(grade.success for grade in grades)
        return Outcome(reward=rewards, metrics={"success": success, "solved": best})
