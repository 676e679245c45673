"""A planner says how, an executor does it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from astraflow.contracts import LLM
from astraflow.types import Outcome, Task
from astraflow.workflows.questions import Questions, said
from astraflow.workflows.roles import ByRoles, choice


class PlannerExecutor(ByRoles):
    """The executor answers the question with the plan before its eyes.

    With `credit = "team"` both earn the grade of the answer. With `"counterfactual"` the executor also answers without
    a plan (agent `<executor>@alone`): the planner earns what its plan gained, the executor the mean of both grades.
    """

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        plan: str = "{question}\nSay briefly how to solve this; do not solve it.",
        execute: str = "{question}\n{plan}",
        credit: Literal["team", "counterfactual"] = "team",
        planner: str = "planner",
        executor: str = "executor",
    ) -> None:
        """`plan`: what the planner is asked, with `{question}`. `execute`: what the executor is, also with `{plan}`."""
        self._questions = Questions(prompt, reward)
        super().__init__({"planner": planner, "executor": executor}, self._questions.fields)
        self._plan, self._execute = plan, execute
        self._alone = choice("credit", credit, ("team", "counterfactual")) == "counterfactual"

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        planner, executor = self.roles["planner"], self.roles["executor"]
        question = self._questions.ask(task)
        if not self._alone:
            grade = await self._questions.grade(await self._with_plan(question, llm), task)
            return Outcome(reward={planner: grade.reward, executor: grade.reward}, metrics={"success": grade.success})
        answers = await asyncio.gather(
            self._with_plan(question, llm), said(llm[executor], question, model=f"{executor}@alone")
        )
        helped, alone = await asyncio.gather(*(self._questions.grade(answer, task) for answer in answers))
        if helped.reward is None or alone.reward is None:
            return Outcome()
        return Outcome(
            reward={
                planner: helped.reward - alone.reward,
                f"{executor}@helped": helped.reward,
                f"{executor}@alone": alone.reward,
            },
            metrics={"success": helped.success, "success_alone": alone.success},
        )

    async def _with_plan(self, question: str, llm: Mapping[str, LLM]) -> str:
        executor = self.roles["executor"]
        plan = await said(llm[self.roles["planner"]], self._plan.replace("{question}", question))
        asked = self._execute.replace("{question}", question).replace("{plan}", plan)
        return await said(llm[executor], asked, model=f"{executor}@helped" if self._alone else executor)
