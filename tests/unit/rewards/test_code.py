"""The reward `code`: what an answer means, references and empty answers, what is unscored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.errors import Problem
from astraflow.rewards.code import Code, assembled, code_in
from astraflow.sandbox.records import Job, Verdict
from astraflow.sources.code.humaneval import HumanEvalSource
from astraflow.sources.code.mbpp import MbppSource
from astraflow.sources.code.snippets import SnippetsSource
from astraflow.types import Task
from sandboxed import needs_sandbox

STUB = {"entries": ["f"], "header": "import math\n", "stub": "import math\n\n\ndef f(a):\n    return "}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\na\n```\nbetter:\n```\nb\n```", "b\n"),
        ("```python\nx = 1", "x = 1"),
    ],
)
def test_the_last_block_is_the_code(answer: str, code: str) -> None:
    assert code_in(answer) == code


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("def f(a):\n    return 1", "import math\ndef f(a):\n    return 1"),
        ("a+1", STUB["stub"] + "a+1\n"),
        ("a+1\nprint(2)\n", STUB["stub"] + "a+1\n"),
        ("(a +\n  1)\nassert False", STUB["stub"] + "(a +\n  1)\n"),
    ],
)  # fmt: skip
def test_an_answer_is_the_whole_or_goes_on_from_the_stub(answer: str, program: str) -> None:
    assert assembled(answer, STUB) == program


SOURCES: dict[str, Any] = {
    "humaneval": HumanEvalSource(limit=40),
    "mbpp": MbppSource(split="test", limit=60),
    "functions": SnippetsSource(kind="lists", split="heldout"),
    "programs": SnippetsSource(form="program", size=10),
}


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
async def test_references_pass_and_nothing_does_not(name: str) -> None:
    source, reward = SOURCES[name], Code(sandbox={"slots": 2, "wall_s": 60.0})
    tasks = [Task(name, row, 0, source.row(row)) for row in range(len(source))]
    oracle = await asyncio.gather(*(reward(task["solution"], task) for task in tasks))
    null = await asyncio.gather(*(reward("", task) for task in tasks[:8]))
    wrong = [task.get("id", task.row) for task, outcome in zip(tasks, oracle, strict=True) if outcome.reward != 1.0]
    assert not wrong
    assert [outcome.reward for outcome in null] == [0.0] * len(null)
    reward.sandbox.close()


TASK = Task("t", 0, 0, {"entries": ["f"], "tests": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]})


@needs_sandbox
async def test_share_counts_tests_and_all_does_not() -> None:
    code = "def f(x):\n    return x * x if x != 2 else 0"
    share = await Code(credit="share", sandbox={"slots": 1})(code, TASK)
    whole = await Code(sandbox={"slots": 1})(code, TASK)
    assert share.reward == pytest.approx(2 / 3) and share.metrics["success"] == 0.0
    assert (whole.reward, whole.metrics["timeout"]) == (0.0, 0.0)


class Broken:
    """A sandbox that fails so often, then does what it should."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes, self.jobs = list(outcomes), list[Job]()

    async def run(self, job: Job) -> Verdict:
        self.jobs.append(job)
        return Verdict(outcome=self.outcomes.pop(0), num_passed=3, num_tests=3)  # type: ignore[arg-type]


@needs_sandbox
async def test_a_sandbox_that_fails_leaves_unscored_and_is_asked_again() -> None:
    reward = Code(sandbox={"slots": 1})
    broken = Broken("error", "timeout", "passed")
    reward.sandbox = broken  # type: ignore[assignment]
    first, second, third, fourth = [await reward("f = abs", TASK) for _ in range(4)]
    assert first.reward is None and first.metrics == {"unscored_sandbox": 1.0}
    assert second.reward == 0.0 and second.metrics["timeout"] == 1.0
    assert third.reward == fourth.reward == 1.0
    assert len(broken.jobs) == 3  # the last was known


@needs_sandbox
async def test_a_task_without_tests_is_an_error_and_no_zero() -> None:
    with pytest.raises(ValueError, match="neither tests nor cases"):
        await Code(sandbox={"slots": 1})("x", Task("t", 0, 0, {"question": "?"}))


def test_wrong_settings_are_named() -> None:
    with pytest.raises(Problem, match=r"workflow\.reward\.credit=some is not known"):
        Code(credit="some")  # type: ignore[arg-type]
    with pytest.raises(Problem, match=r"workflow\.reward\.sandbox\.memory=1 is no setting"):
        Code(sandbox={"memory": 1})
