"""An actor answers, a verifier says whether that is right, and the actor may try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.contracts import LLM
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.questions import Questions, said, together, user
from astraflow.workflows.roles import ByRoles, at_least, some_text


class ActorVerifier(ByRoles):
    """Up to `attempts` answers; an answer that the verifier accepts is the last one.

    The actor earns the grade of its last answer, the verifier the share of its verdicts that were right. Per call: the
    grade of each answer, 1 or 0 for each verdict.
    """

    def __init__(
        self,
        *,
        reward: str | Mapping[str, Any],
        prompt: str = "{question}",
        check: str = "{question}\n{answer}\nIs this right? Say yes or no.",
        retry: str = "That is wrong. Try again.",
        accept: str = "y",
        attempts: int = 2,
        actor: str = "actor",
        verifier: str = "verifier",
    ) -> None:
        """`check`: what the verifier is asked, with `{question}` and `{answer}`. `accept`: how a verdict begins that
        accepts an answer, whatever its case. `retry`: what the actor hears after one that does not."""
        self._questions = Questions(prompt, reward)
        super().__init__({"actor": actor, "verifier": verifier}, self._questions.fields, apart=True)
        self._check, self._retry, self._accept = check, retry, some_text("accept", accept, "use y for yes")
        self._attempts = at_least("attempts", attempts, 1, "use 1 for one answer and one verdict")

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        actor, verifier = self.roles["actor"], self.roles["verifier"]
        question = self._questions.ask(task)
        messages: list[Message] = [user(question)]
        grades, verdicts = [], []
        for _ in range(self._attempts):
            reply = await llm[actor].chat(messages)
            answer = reply.content or ""
            grades.append(await self._questions.grade(answer, task))
            asked = self._check.replace("{question}", question).replace("{answer}", answer)
            accepted = (await said(llm[verifier], asked)).casefold().startswith(self._accept)
            verdicts.append(float(accepted == bool(grades[-1].success)))
            if accepted:
                break
            messages += [reply.message, user(self._retry)]
        rewards = [grade.reward for grade in grades if grade.reward is not None]
        if len(rewards) < len(grades):
            return Outcome()
        return Outcome(
            reward={actor: rewards[-1], verifier: together(rewards[-1], sum(verdicts) / len(verdicts))},
            rewards_per_call={actor: rewards, verifier: verdicts},
            metrics={"success": grades[-1].success, "attempts": float(len(grades))},
        )
