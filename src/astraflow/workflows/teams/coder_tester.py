"""A coder writes code, a tester writes tests for the same task, and hidden tests say who was right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError
from astraflow.rewards.code import Code, assembled, code_in
from astraflow.types import Message, Outcome, Task
from astraflow.workflows.questions import Questions, said, user
from astraflow.workflows.roles import ByRoles, at_least

_ASK_TESTS = "{question}\n\nDo not write the code. Write tests for it: Python with assert, in one code block."


class CoderTester(ByRoles):
    """Up to `attempts` codes; one that passes the tester's test is the last, and the task's hidden tests judge it.

    The coder earns what they say of its last code, and per call what they say of each. The tester earns the share of
    verdicts of its test that are right: of each code of the coder (right if the hidden tests pass), of the task's
    solution where it is known (right), and of one that returns None (wrong). So tests that pass everything, or nothing,
    earn little. A reply without a test of the task's function earns 0, and no code is tried again for it.
    """

    def __init__(
        self, *, prompt: str = "{question}", test_prompt: str = _ASK_TESTS,
        retry: str = "This test fails:\n{test}\nWrite the code again.", attempts: int = 1,
        credit: Literal["all", "share"] = "all", sandbox: Mapping[str, Any] | None = None,
        coder: str = "coder", tester: str = "tester",
    ) -> None:  # fmt: skip
        """`prompt`, `test_prompt`: what each is asked. `retry`: what the coder hears of a code that fails the tester's
        test, with `{test}`; "": it is asked anew, and does not see what it wrote. `credit`, `sandbox`: as of the reward
        `code`. `coder`, `tester`: policies."""
        self._code = Code(credit=credit, sandbox=sandbox)
        self._ask_code, self._ask_tests = Questions(prompt, "exact"), Questions(test_prompt, "exact")
        self._retry, self._attempts = retry, at_least("attempts", attempts, 1, "use 1 for one code that is not retried")
        roles = {"coder": coder, "tester": tester}
        super().__init__(roles, tuple(dict.fromkeys((*self._ask_code.fields, *self._ask_tests.fields))), apart=True)

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        if not task.get("entries") or not task.get("tests"):
            raise EpisodeError("task: coder_tester needs a task of functions, with entries and tests")
        coder, tester = self.roles["coder"], self.roles["tester"]
        messages: list[Message] = [user(self._ask_code.ask(task))]
        reply, written = await asyncio.gather(llm[coder].chat(messages), said(llm[tester], self._ask_tests.ask(task)))
        test, grades, agreed = _test_of(written, task), [], []
        while True:
            code = assembled((reply.content or "").strip(), task.fields)
            hidden, seen = await asyncio.gather(self._code.verdict(code, task), self._passes(code, test, task))
            grades.append(self._code.outcome(hidden))
            agreed.append(seen == (hidden.outcome == "passed"))
            if seen or not test or len(grades) == self._attempts:
                break
            if self._retry:
                messages += [reply.message, user(self._retry.replace("{test}", test))]
            reply = await llm[coder].chat(messages)
        rewards = [grade.reward for grade in grades if isinstance(grade.reward, float)]
        if len(rewards) < len(grades):
            return next(grade for grade in grades if grade.reward is None)
        known = _known(task)
        passes = await asyncio.gather(*(self._passes(other, test, task) for other, _ in known))
        agreed += [passed == right for passed, (_, right) in zip(passes, known, strict=True)]
        share = sum(agreed) / len(agreed) if test else 0.0
        metrics = {
            **grades[-1].metrics, "attempts": float(len(grades)), "tests_written": float(bool(test)),
            "tests_agree": share,
        }  # fmt: skip
        return Outcome(reward={coder: rewards[-1], tester: share}, rewards_per_call={coder: rewards}, metrics=metrics)

    async def _passes(self, code: str, test: str, task: Task) -> bool:
        """Whether `code` passes the tester's test; none does when there is no test."""
        return bool(test) and (await self._code.judge(code, (test,), task)).outcome == "passed"


def _known(task: Task) -> list[tuple[str, bool]]:
    """Codes of which is known whether they are right."""
    wrong = "\n".join(f"def {name}(*_, **__):\n    return None" for name in task["entries"])
    solution = task.get("solution")
    return [(wrong, False), *([(solution, True)] if solution else [])]


def _test_of(written: str, task: Task) -> str:
    """The tests in a reply, or what it adds to the beginning of one (`test_stub`); "": it holds none."""
    test, stub = code_in(written).strip(), task.get("test_stub") or ""
    if stub and test and "assert" not in test:
        test = stub + test.splitlines()[0]
    return test if "assert" in test and any(name in test for name in task["entries"]) else ""
