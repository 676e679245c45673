"""Code, judged by tests in a sandbox."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from astraflow.errors import Problem
from astraflow.sandbox.pool import shared
from astraflow.sandbox.records import Job, Verdict, settings_of
from astraflow.types import Outcome, Task

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_GOES_ON = re.compile(r"^(?:[^\s)\]}#@]|@|#|```)", re.MULTILINE)  # a line of the outermost level: past the stub's body
NUM_KEPT = 10_000  # verdicts, so that what siblings have in common is run once


def code_in(completion: str) -> str:
    """The last code block that is no example of a few words, else the whole text."""
    blocks = _BLOCK.findall(completion)
    return str(blocks[-1]) if blocks else completion


def assembled(completion: str, task: Mapping[str, Any]) -> str:
    """The program that the answer means: what it defines behind the header, or what it adds to the stub."""
    code = code_in(completion)
    entries, stub = task.get("entries") or (), task.get("stub") or ""
    if not stub or any(_defines(code, name) for name in entries):
        return f"{task.get('header') or ''}{code}"
    if stub[-1:].isspace() and not stub.endswith("\n"):  # the stub ends within a line
        first, _, rest = code.partition("\n")
    else:
        first, rest = "", code
    end = _GOES_ON.search(rest)
    rest = rest[: end.start()] if end else rest
    return stub + first + ("\n" if first else "") + rest


def _defines(code: str, name: str) -> bool:
    return bool(
        re.search(rf"^(?:(?:async\s+)?def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*=", code, re.MULTILINE)
    )


class Code:
    """`credit = "all"`: 1.0 when every test passes, else 0; `"share"`: the share of tests that pass.

    Timeouts and crashes are failures of the code. When the sandbox itself fails, the answer is unscored. Metrics:
    `success` (all tests passed), `tests_passed` (share; with "all" up to the first failure), `timeout`;
    `unscored_sandbox` where it is unscored; `isolation_weak` where that was asked for.
    """

    def __init__(self, *, credit: Literal["all", "share"] = "all", sandbox: Mapping[str, Any] | None = None) -> None:
        """`sandbox`: `astraflow.sandbox.records.Settings`. Raises: Problem: a wrong setting, or no sandbox here."""
        if credit not in ("all", "share"):
            raise Problem("workflow.reward.credit", credit, "is not known", "use 'all' or 'share'")
        self._credit = credit
        self.sandbox = shared(settings_of(sandbox or {}, "workflow.reward.sandbox"), "workflow.reward.sandbox")
        self._kept: OrderedDict[Job, Verdict] = OrderedDict()

    async def __call__(self, completion: str, task: Task) -> Outcome:
        return self.outcome(await self.verdict(assembled(completion, task.fields), task))

    async def verdict(self, code: str, task: Task) -> Verdict:
        """What the tests of the task say of a whole program. Raises: ValueError: the task has no tests."""
        return await self._run(self.job(code, task))

    async def judge(self, code: str, tests: tuple[str, ...], task: Task) -> Verdict:
        """What tests that a model wrote say of a whole program."""
        entries = tuple(task.get("entries") or ())
        setup = task.get("setup") or ""
        return await self._run(Job(code=code, entries=entries, setup=setup, tests=tests, trusted=False))

    async def _run(self, job: Job) -> Verdict:
        if (known := self._kept.get(job)) is not None:
            self._kept.move_to_end(job)
            return known
        verdict = await self.sandbox.run(job)
        if verdict.outcome in ("passed", "failed"):
            self._kept[job] = verdict
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return verdict

    def job(self, code: str, task: Task) -> Job:
        """Raises: ValueError: the task has no tests."""
        tests, cases = tuple(task.get("tests") or ()), tuple(map(_case, task.get("cases") or ()))
        if not tests and not cases:
            raise ValueError("the task has neither tests nor cases; see docs/workloads.md for what a row of code holds")
        return Job(
            code=code, entries=tuple(task.get("entries") or ()), setup=task.get("setup") or "",
            given=task.get("given") or "", tests=tests, cases=cases, stop=self._credit == "all",
        )  # fmt: skip

    def outcome(self, verdict: Verdict) -> Outcome:
        """The reward of a verdict."""
        weak = {"isolation_weak": 1.0} if verdict.isolation == "weak" else {}
        if verdict.outcome == "error":
            return Outcome(metrics={"unscored_sandbox": 1.0, **weak})
        passed = float(verdict.outcome == "passed")
        share = verdict.num_passed / max(1, verdict.num_tests)
        metrics = {"success": passed, "tests_passed": share, "timeout": float(verdict.outcome == "timeout"), **weak}
        return Outcome(reward=passed if self._credit == "all" else share, metrics=metrics)


def _case(pair: Any) -> tuple[str, str]:
    given, wanted = pair
    return str(given), str(wanted)
