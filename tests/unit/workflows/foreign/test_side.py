"""The program beside a worker: answers by number, failures, its end, its next life; and what is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from astraflow.errors import EpisodeError, Problem
from astraflow.types import Task
from astraflow.workflows.foreign.side import Side
from astraflow.workflows.foreign.verifiers import Verifiers

PROGRAM = Path(__file__).parents[3] / "support" / "side_program.py"


@pytest.fixture
async def side() -> AsyncIterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(mode: str = "good", start_s: float = 20.0) -> Side:
        made.append(Side([sys.executable, str(PROGRAM), mode], start_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def ask(task: int) -> dict[str, Any]:
    return {"task": task, "url": "http://x/v1", "key": "k", "model": "actor"}


async def test_answers_find_their_episodes(side: Callable[..., Side]) -> None:
    program = side()
    numbers = [5, 0, 9, 7]  # beside a line that is no answer
    told = await asyncio.gather(*(program.play(ask(n)) for n in numbers))
    assert [t.reward for t in told] == [5.0, 1.0, 9.0, 7.0]
    assert told[1].metrics["length"] == 3.0


async def test_a_failed_rollout_is_an_error_and_the_program_goes_on(side: Callable[..., Side]) -> None:
    program = side()
    pid = (await program.play(ask(0))).metrics["pid"]
    with pytest.raises(EpisodeError, match=r"^env_error: ProviderError: no model$"):
        await program.play(ask(1))
    assert (await program.play(ask(0))).metrics["pid"] == pid


async def test_a_program_that_ends_fails_all_its_episodes_and_is_started_again(side: Callable[..., Side]) -> None:
    program = side()
    waiting = asyncio.ensure_future(program.play(ask(3)))
    pid = (await program.play(ask(0))).metrics["pid"]
    for failed in (program.play(ask(2)), waiting):
        with pytest.raises(EpisodeError, match=r"^env_error: its program ended \(exit 7\)$"):
            await failed
    assert (await program.play(ask(0))).metrics["pid"] != pid


async def test_a_cancelled_episode_is_cancelled_there_too(side: Callable[..., Side]) -> None:
    program = side()
    await program.play(ask(0))
    playing = asyncio.ensure_future(program.play(ask(3)))
    await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert (await program.play(ask(0))).reward == 1.0


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("broken", r"^env_error: .*side_program\.py did not begin: ImportError: no taskset$"),
        ("problem", r"^env_error: .* did not begin: ModuleNotFoundError: no_such_taskset$"),
        ("slow", r"^env_timeout: .* was not ready in 0\.5 s$"),
    ],
)
async def test_what_does_not_begin_is_told(side: Callable[..., Side], mode: str, error: str) -> None:
    program = side(mode, 0.5 if mode == "slow" else 20.0)
    with pytest.raises(EpisodeError, match=error):
        await program.play(ask(0))


async def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(EpisodeError, match="does not start"):
        await Side(["/no/such/python", "x"], 5.0).play(ask(0))


async def test_the_workflow_hands_over_endpoint_key_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.workflows.foreign.verifiers._look_at", lambda python: None)
    play = Verifiers(taskset="sums", python="python3")
    asked: list[Any] = []

    class Program:
        async def play(self, what: Any) -> Any:
            asked.append(what)
            return SimpleNamespace(reward=0.5, metrics={"a": 1.0})

    play._sides[asyncio.get_running_loop()] = Program()  # type: ignore[assignment]
    llm: Any = {"actor": SimpleNamespace(base_url="http://gate/v1", api_key="key")}
    outcome = await play(Task("t", 3, 0, {"seed": 17}), llm)
    assert (outcome.reward, outcome.metrics) == (0.5, {"a": 1.0})
    assert asked == [{"task": 17, "url": "http://gate/v1", "key": "key", "model": "actor"}]


@pytest.mark.parametrize(
    ("python", "words"),
    [("/no/such/python", ["cannot be started", "pip install verifiers"]), (sys.executable, ["has no verifiers"])],
)
def test_an_interpreter_without_verifiers_is_refused(python: str, words: list[str]) -> None:
    with pytest.raises(Problem) as caught:
        Verifiers(taskset="sums", python=python)
    assert all(word in str(caught.value) for word in words), str(caught.value)
