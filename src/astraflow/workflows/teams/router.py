"""A router says which of two models answers: the small one that is cheap, or the large one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.types import Outcome, Task
from astraflow.workflows.questions import Questions, said
from astraflow.workflows.roles import ByRoles


class Router(ByRoles):
    """What the router says begins with `choose_large`: the large model answers; else the small one does.

    Who answers earns the grade. The router earns it too, less `cost` where it chose the large one. Who is not called
    gets no trajectory of the episode: its groups are of those episodes in which it was.
    """

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        route: str = "{question}\nWho should answer, small or large?",
        choose_large: str = "l",
        cost: float = 0.2,
        router: str = "router",
        small: str = "small",
        large: str = "large",
    ) -> None:
        """`route`: what the router is asked, with `{question}`. `cost`: of a call of the large model, in reward."""
        self._questions = Questions(prompt, reward)
        super().__init__({"router": router, "small": small, "large": large}, self._questions.fields)
        self._route, self._large, self._cost = route, choose_large.casefold(), cost

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        question = self._questions.ask(task)
        route = await said(llm[self.roles["router"]], self._route.replace("{question}", question))
        large = route.casefold().startswith(self._large)
        chosen = self.roles["large" if large else "small"]
        grade = self._questions.grade(await said(llm[chosen], question), task)
        if grade.reward is None:
            return Outcome()
        return Outcome(
            reward={self.roles["router"]: grade.reward - self._cost * large, chosen: grade.reward},
            metrics={"success": grade.success, "large": float(large)},
        )
