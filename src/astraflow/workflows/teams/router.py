"""A router says which of two models answers: the small one that is cheap, or the large one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.errors import Problem
from astraflow.types import Outcome, Task
from astraflow.workflows.questions import Questions, said
from astraflow.workflows.roles import ByRoles, at_least, some_text


class Router(ByRoles):
    """What the router says begins with `choose_large`: the large model answers; else the small one does.

    Who answers earns the grade. The router earns it too, less `cost` where it chose the large one. Who is not called
    gets no trajectory of the episode: its groups are of those episodes in which it was. A router that has made up its
    mind would starve the other model, which `explore` prevents.
    """

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        route: str = "{question}\nWho should answer, small or large?",
        choose_large: str = "l",
        cost: float = 0.2,
        explore: float = 0.0,
        router: str = "router",
        small: str = "small",
        large: str = "large",
    ) -> None:
        """`route`: what the router is asked, with `{question}`. `cost`: of a call of the large model, in reward.
        `explore`: share of tasks, evaluation included, whose episodes all go to one of the two without a router."""
        self._questions = Questions(prompt, reward)
        super().__init__({"router": router, "small": small, "large": large}, self._questions.fields, apart=True)
        at_least("cost", cost, 0, "use 0 for models of equal price")
        self._route, self._cost = route, cost
        self._large = some_text("choose_large", choose_large, "use l for large")
        if not 0 <= explore < 1:
            raise Problem("workflow.explore", explore, "must be in [0, 1)", "use 0 for a router that always decides")
        self._explore = explore

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        question = self._questions.ask(task)
        chance = random.Random(task.group_id)  # of the task, so that siblings are a group of who answers
        explores = chance.random() < self._explore
        if explores:
            large = chance.random() < 0.5
        else:
            route = await said(llm[self.roles["router"]], self._route.replace("{question}", question))
            large = route.casefold().startswith(self._large)
        chosen = self.roles["large" if large else "small"]
        grade = await self._questions.grade(await said(llm[chosen], question), task)
        if grade.reward is None:
            return Outcome()
        rewards: dict[str, float | None] = {chosen: grade.reward}
        if not explores:
            rewards[self.roles["router"]] = grade.reward - self._cost * large
        return Outcome(reward=rewards, metrics={"success": grade.success, "large": float(large)})
