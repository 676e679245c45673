"""A coder writes code, a tester writes tests for the same task, and hidden tests say who was right."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from astraflow.contracts import LLM
from astraflow.errors import EpisodeError
from astraflow.rewards.code import Code, assembled, code_in
from astraflow.types import Outcome, Task
from astraflow.workflows.questions import Questions, said
from astraflow.workflows.roles import ByRoles

_ASK_TESTS = "{question}\n\nDo not write the code. Write tests for it: Python with assert, in one code block."


class CoderTester(ByRoles):
    """The coder earns what the task's own tests say of its code.

    The tester earns the share of verdicts of its tests that are right, of three codes: the coder's (right if the
    hidden tests pass), the task's solution where it is known (right), and one that returns None (wrong). So tests that
    pass everything, or nothing, earn little. A reply without a test of the task's function earns 0.
    """

    def __init__(
        self, *, prompt: str = "{question}", test_prompt: str = _ASK_TESTS, credit: Literal["all", "share"] = "all",
        sandbox: Mapping[str, Any] | None = None, coder: str = "coder", tester: str = "tester",
    ) -> None:  # fmt: skip
        """`prompt`, `test_prompt`: what each is asked. `credit`, `sandbox`: as of the reward `code`. `coder`, `tester`:
        policies."""
        self._code = Code(credit=credit, sandbox=sandbox)
        self._ask_code, self._ask_tests = Questions(prompt, "exact"), Questions(test_prompt, "exact")
        roles = {"coder": coder, "tester": tester}
        super().__init__(roles, tuple(dict.fromkeys((*self._ask_code.fields, *self._ask_tests.fields))))

    async def __call__(self, task: Task, llm: Mapping[str, LLM]) -> Outcome:
        entries = task.get("entries")
        if not entries or not task.get("tests"):
            raise EpisodeError("task: coder_tester needs a task of functions, with entries and tests")
        coder, tester = self.roles["coder"], self.roles["tester"]
        answer, written = await asyncio.gather(
            said(llm[coder], self._ask_code.ask(task)), said(llm[tester], self._ask_tests.ask(task))
        )
        code, test = assembled(answer, task.fields), _test_of(written, task)
        hidden, *seen = await asyncio.gather(self._code.verdict(code, task), *self._verdicts(code, test, task))
        graded = self._code.outcome(hidden)
        if graded.reward is None or isinstance(graded.reward, dict):
            return graded
        right = [hidden.outcome == "passed", False, True][: len(seen)]
        agreed = [(verdict.outcome == "passed") == wanted for verdict, wanted in zip(seen, right, strict=True)]
        share = sum(agreed) / len(agreed) if agreed else 0.0
        metrics = {**graded.metrics, "tests_written": float(bool(test)), "tests_agree": share}
        return Outcome(reward={coder: graded.reward, tester: share}, metrics=metrics)

    def _verdicts(self, code: str, test: str, task: Task) -> list[Any]:
        """Of the tester's test on each code: the coder's, a wrong one, the right one."""
        if not test:
            return []
        wrong = "\n".join(f"def {name}(*_, **__):\n    return None" for name in task["entries"])
        return [self._code.judge(c, (test,), task) for c in (code, wrong, task.get("solution")) if c]


def _test_of(written: str, task: Task) -> str:
    """The tests in a reply, or what it adds to the beginning of one (`test_stub`); "": it holds none."""
    test, stub = code_in(written).strip(), task.get("test_stub") or ""
    if stub and test and "assert" not in test:
        test = stub + test.splitlines()[0]
    return test if "assert" in test and any(name in test for name in task["entries"]) else ""
