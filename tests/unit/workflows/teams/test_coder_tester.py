"""A coder and a tester: what each earns by code that runs in the sandbox."""

from __future__ import annotations

import pytest

from astraflow.errors import EpisodeError
from astraflow.models.chat import ChatTokenizer
from astraflow.types import Task
from sandboxed import needs_sandbox
from team_table import Table, built

CODE = Task("train", 0, 0, {
    "question": "twice a", "entries": ["f"], "stub": "def f(a):\n    return ", "solution": "def f(a):\n    return 2*a",
    "tests": ["assert f(1) == 2", "assert f(4) == 8"], "test_stub": "assert f(3) == ",
})  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "test", "rewards"),
    [
        ("2*a", "6", (1.0, 1.0)),
        ("a+a", "7", (1.0, 1 / 3)),  # right of the code that is wrong alone
        ("a", "6", (0.0, 1.0)),
        ("a+3", "6", (0.0, 2 / 3)),  # a test that lets wrong code pass
        ("2*a", "f", (1.0, 1 / 3)),
        ("2*a", "", (1.0, 0.0)),
    ],
)
async def test_a_tester_earns_what_its_tests_tell_apart(
    chat: ChatTokenizer, code: str, test: str, rewards: tuple[float, float]
) -> None:
    table = Table(chat, coder=[code], tester=[test])
    play = built("coder_tester", ["coder", "tester"], test_prompt="{question} {test_stub}", sandbox={"slots": 1})
    outcome = await table.play(play, CODE)
    assert (table.rewards["coder"], table.rewards["tester"]) == pytest.approx(rewards)
    assert outcome.metrics["success"] == rewards[0] and outcome.metrics["tests_written"] == float(bool(test))


@needs_sandbox
@pytest.mark.parametrize(("retry", "second"), [("", "twice a"), ("{test} fails:", "twice aa+3assert f(3) == 6 fails:")])
async def test_code_that_fails_the_testers_test_is_written_again(chat: ChatTokenizer, retry: str, second: str) -> None:
    play = built(
        "coder_tester", ["coder", "tester"], test_prompt="{question} {test_stub}", attempts=3, retry=retry,
        sandbox={"slots": 1},
    )  # fmt: skip
    wrong, right = "a*a", "2*a"
    table = Table(chat, coder=[wrong, right, wrong], tester=["6"])
    outcome = await table.play(play, CODE)
    assert table.told["coder"] == ["twice a", second.replace("a+3", wrong)] and len(table.told["tester"]) == 1
    assert outcome.reward == {"coder": 1.0, "tester": 1.0} and outcome.rewards_per_call == {"coder": [0.0, 1.0]}
    assert outcome.metrics["success"] == 1.0 and outcome.metrics["attempts"] == 2.0


@needs_sandbox
@pytest.mark.parametrize(("test", "codes", "share"), [("7", 3, 1 / 5), ("", 1, 0.0)])
async def test_a_wrong_test_costs_attempts_and_none_at_all_costs_none(
    chat: ChatTokenizer, test: str, codes: int, share: float
) -> None:
    play = built("coder_tester", ["coder", "tester"], test_prompt="{test_stub}", attempts=3, sandbox={"slots": 1})
    table = Table(chat, coder=["2*a"] * 3, tester=[test])
    outcome = await table.play(play, CODE)
    assert len(table.told["coder"]) == codes
    assert outcome.reward == {"coder": 1.0, "tester": pytest.approx(share)}


@needs_sandbox
async def test_a_coder_without_tests_of_the_task_is_an_error(chat: ChatTokenizer) -> None:
    play = built("coder_tester", ["coder", "tester"], sandbox={"slots": 1})
    with pytest.raises(EpisodeError, match="needs a task of functions"):
        await Table(chat, coder=["x"], tester=["x"]).play(play)
