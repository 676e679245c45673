"""Reward functions of TRL, verl and verifiers, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreign_rewards
from astraflow.errors import EpisodeError, Problem
from astraflow.rewards.function import Function
from astraflow.types import Outcome, Task
from astraflow.workflows.load import reward_function
from astraflow.workflows.questions import Questions

TASK = Task("train", 0, 0, {"question": "3+4?", "answer": "7"})
GSM = {
    "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "3+4?"}],
    "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"floor": 0.1},
}  # fmt: skip


def of(style: str, name: str | list[str], **options: Any) -> Any:
    names = [f"foreign_rewards:{n}" for n in ([name] if isinstance(name, str) else name)]
    return reward_function({"type": "function", "style": style, "function": names, **options})


@pytest.mark.parametrize(("said", "reward"), [(r"It is \boxed{7}.", 1.0), (r"\boxed{8}", 0.0), ("7", 0.0)])
async def test_trl_gets_conversations_and_columns(said: str, reward: float) -> None:
    assert await of("trl", "trl_box")(said, TASK) == Outcome(reward=reward, metrics={"reward_trl_box": reward})


async def test_trl_texts_and_none() -> None:
    plain = of("trl", "trl_plain", form="text")
    assert (await plain("12345", TASK)).reward == 0.5
    assert (await plain("", TASK)).reward is None


async def test_a_weighted_sum_leaves_out_who_says_nothing() -> None:
    both = of("trl", ["trl_plain", "trl_waits"], form="text", weights=[2.0, 1.0])
    assert (await both("12345", TASK)).reward == 1.5
    assert await both("", TASK) == Outcome(reward=0.5, metrics={"reward_trl_waits": 0.5})


@pytest.mark.parametrize(("said", "reward"), [("so #### 7", 1.0), ("so #### 8", 0.1)])
async def test_verl_gets_the_fields_of_its_data_sets(said: str, reward: float) -> None:
    outcome = await of("verl", "verl_score")(said, Task("t", 0, 0, GSM))
    assert outcome == Outcome(reward=reward, metrics={"acc": float(reward == 1), "reward_verl_score": reward})


async def test_verl_gets_our_fields_where_there_are_no_others() -> None:
    task = Task("openai/gsm8k", 0, 0, {"question": "3+4?", "answer": "7"})
    assert (await of("verl", "verl_score")("#### 7", task)).reward == 1.0


async def test_verifiers_gets_what_it_names() -> None:
    assert (await of("verifiers", "verifiers_exact")("7", TASK)).reward == 1.0
    assert (await of("verifiers", "verifiers_exact", answer="question")("7", TASK)).reward == 0.0


RETURNED = [
    (np.float32(0.5), 0.5), (np.array([0.5]), 0.5), (np.array(0.5), 0.5), ([np.float64(0.5)], 0.5),
    (np.bool_(True), 1.0), ({"score": np.int64(1)}, 1.0), (float("nan"), None), ([np.nan], None),
    ({"score": None}, None), ("1.0", TypeError), (b"1", TypeError), (["yes"], TypeError), ([], ValueError),
    ([0.5, 1.0], ValueError), (np.array([0.5, 1.0]), ValueError), ([[0.5]], TypeError),
    ({"reward": 1.0}, ValueError), (10**400, OverflowError),
]  # fmt: skip


@pytest.mark.parametrize(("said", "reward"), RETURNED, ids=repr)
@pytest.mark.parametrize("style", ["trl", "verl", "verifiers"])
async def test_what_functions_return_is_a_number_unscored_or_an_error(
    monkeypatch: pytest.MonkeyPatch, style: str, said: Any, reward: Any
) -> None:
    monkeypatch.setattr(foreign_rewards, "given", lambda **_: said, raising=False)
    if isinstance(reward, type):
        with pytest.raises(reward):
            await of(style, "given")("7", TASK)
    else:
        assert (await of(style, "given")("7", TASK)).reward == reward


async def test_numbers_beside_a_score_are_metrics_where_they_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"score": 1, "acc": np.float32(0.5), "lost": float("nan"), "pred": "x"}
    monkeypatch.setattr(foreign_rewards, "given", lambda **_: said, raising=False)
    assert (await of("verl", "given")("7", TASK)).metrics == {"acc": 0.5, "reward_given": 1.0}


async def test_functions_of_one_name_in_two_modules_are_both_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, reward in (("one_rewards", 0.25), ("two_rewards", 0.5)):
        (tmp_path / f"{name}.py").write_text(f"def right(completions, **columns):\n    return [{reward}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"type": "function", "style": "trl", "function": ["one_rewards:right", "two_rewards:right"]}
    outcome = await reward_function(spec)("7", TASK)
    assert outcome.reward == 0.75
    assert outcome.metrics == {"reward_one_rewards.right": 0.25, "reward_two_rewards.right": 0.5}


@pytest.mark.parametrize(("style", "name"), [("verl", "verl_score"), ("trl", "two_of_them")])
async def test_a_function_that_fails_is_an_error_of_the_episode(style: str, name: str) -> None:
    spec = {"type": "function", "style": style, "function": f"foreign_rewards:{name}"}
    with pytest.raises(EpisodeError, match=r"^reward: "):
        await Questions("{question}", spec).outcome("7", TASK)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"style": "trl", "function": "foreign_rewards:trl_of_ids"}, ["trl_of_ids", "completion_ids"]),
        ({"style": "verl", "function": "foreign_rewards:trl_box"}, ["trl_box", "another signature", "solution_str"]),
        ({"style": "trl", "function": "foreign_rewards:none"}, ["none", "cannot be imported"]),
        ({"style": "tlr", "function": "foreign_rewards:trl_box"}, ["tlr", "trl, verl, verifiers"]),
        ({"style": "trl", "function": ["foreign_rewards:trl_box"] * 2}, ["names one function twice"]),
        ({"style": "trl", "function": ["foreign_rewards:trl_box"], "weights": [1.0, 2.0]}, ["must be 1 numbers"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Problem) as caught:
        Function(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
