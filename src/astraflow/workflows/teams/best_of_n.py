"""Several answers of one policy, of which a judge's marks choose the best."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.types import Outcome, Task
from astraflow.workflows.questions import Questions, said
from astraflow.workflows.roles import ByRoles, at_least

_MARK = re.compile(r"\d+(?:\.\d+)?")


class BestOfN(ByRoles):
    """Each of `n` answers gets a mark from 0 to `marks` by the judge (no number: 0); the best one is the answer.

    Each answer earns its grade and each mark how near it is to the grade, `1 - |mark / marks -
    grade|`. With `learn_from_judge` answers earn their marks, and the judge nothing: it should be
    a policy with `frozen = true`.
    The judge and the policy are credited per call by agents `@1`, `@2`, ...
    """

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        judge_prompt: str = "{question}\n{answer}\nHow good is this answer? Say a number from 0 to 9.",
        n: int = 4,
        marks: int = 9,
        learn_from_judge: bool = False,
        policy: str = "actor",
        judge: str = "judge",
    ) -> None:
        """`judge_prompt`: what the judge is asked, with `{question}` and `{answer}`. `learn_from_judge`: answers earn
        marks instead of grades, which are only reported."""
        self._questions = Questions(prompt, reward)
        super().__init__({"policy": policy, "judge": judge}, self._questions.fields, apart=True)
        self._judge_prompt, self._by_judge = judge_prompt, learn_from_judge
        self._n = at_least("n", n, 2, "with one answer there is no best one")
        self._marks = at_least("marks", marks, 1, "use 9 for one digit")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        policy, judge = self.roles["policy"], self.roles["judge"]
        question = self._questions.ask(task)

        async def judged(number: int) -> tuple[str, float]:
            answer = await said(llm[policy], question, model=f"{policy}@{number}")
            asked = self._judge_prompt.replace("{question}", question).replace("{answer}", answer)
            found = _MARK.search(await said(llm[judge], asked, model=f"{judge}@{number}"))
            return answer, min(1.0, float(found[0]) / self._marks) if found is not None else 0.0

        answers = await asyncio.gather(*(judged(number) for number in range(1, self._n + 1)))
        grades = await asyncio.gather(*(self._questions.grade(answer, task) for answer, _ in answers))
        best = max(range(self._n), key=lambda place: answers[place][1])
        rewards: dict[str, float | None] = {} if not self._by_judge else {judge: None}
        for number, ((_, mark), grade) in enumerate(zip(answers, grades, strict=True), 1):
            if self._by_judge:
                rewards[f"{policy}@{number}"] = mark
                continue
            if grade.reward is None:
                return Outcome()
            rewards[f"{policy}@{number}"] = grade.reward
            rewards[f"{judge}@{number}"] = 1.0 - min(1.0, abs(mark - grade.reward))
        metrics = {"success": grades[best].success, "solved": max(grade.success for grade in grades)}
        return Outcome(reward=rewards, metrics=metrics)
