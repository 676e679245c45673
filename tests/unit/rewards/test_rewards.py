"""Graders: a slope towards the right answer, and None where nothing can be graded."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.rewards.exact import Exact
from astraflow.rewards.numbers import ShapedGsm8k, ShapedNumber, final_number, parse_number
from astraflow.types import Outcome, Task


def task(answer):
    return Task("train", 0, 0, {"question": "?", "answer": answer})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"), ("12.", "12"), ("The sum is 1,000.", "1000"), ("$5.50 each", "5.50"), ("x=-7", "-7"),
        ("\u22127", "-7"), ("\uff11\uff12", "12"), ("3-7 = -4", "-4"), ("10-3", "3"), (".5", ".5"), ("**12**", "12"),
        ("5 cm", "5"), ("4 * 3 = 12", "12"), ("50%", "50"), ("1,234,567.89", "1234567.89"), ("+8", "8"),
        ("none", None), ("", None), ("9" * 5000, None), ("x5", None),
    ],
)  # fmt: skip
def test_the_last_number_is_read(text, number):
    assert parse_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number", "in_format"),
    [
        ("... so 3*4=12\n#### 12", "12", True),
        ("The answer is 12 apples and 3 pears", "12", True),
        ("#### 5\nWait. #### 7", "7", True),
        ("so \\boxed{1,200} it is 3", "1200", True),
        ("Answer: $18.00", "18", True),
        ("He has 4 and then 9", "9", False),
        ("the answer is unclear, maybe 4", "4", True),
        ("the answer is unclear", None, False),
    ],
)
def test_the_final_number_of_a_worked_solution_is_found(text, number, in_format):
    assert final_number(text) == (None if number is None else Decimal(number), in_format)


def test_gsm8k_rewards_rise_towards_the_right_answer():
    grade = ShapedGsm8k()
    replies = ["no idea", "maybe 9000", "maybe 70", "#### 9000", "#### 70", "#### 72"]
    scores = [grade(reply, task("72")).reward for reply in replies]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)
    assert scores[0] == 0.0 and scores[-1] == 1.0
    assert all(s < 0.25 for s in scores[:-1])


@pytest.mark.parametrize("form", ["72", "It is 72.", "$72.00", "72 dollars", "**72**", "The answer is 72"])
def test_any_form_of_the_right_number_is_right(form):
    assert ShapedGsm8k()(form, task("72")) == Outcome(reward=1.0, metrics={"success": 1.0})


def test_sum_rewards_rise_towards_the_bare_right_number():
    grade = ShapedNumber()
    replies = ["hello", "It may well be 9 in the end", "99", "92", "The sum of 7 and 5 is 12.", "7+5=12", "12"]
    outcomes = [grade(reply, task("12")) for reply in replies]
    assert [o.metrics["success"] for o in outcomes] == [0, 0, 0, 0, 1, 1, 1]
    scores = [o.reward for o in outcomes]
    assert scores == sorted(scores)
    assert scores[0] == 0.0 and scores[-1] == 1.0 and scores[-2] < 1.0


@given(st.text(max_size=300), st.integers(-999, 999))
def test_shaped_rewards_stay_between_zero_and_one(text, answer):
    for grade in (ShapedNumber(), ShapedGsm8k()):
        outcome = grade(text, task(str(answer)))
        assert outcome is not None and 0.0 <= outcome.reward <= 1.0


@pytest.mark.parametrize(
    "text", ["((((" * 1000, "10^{10^{10^{10}}}", "\\boxed{" * 2000, "1," * 4000, "answer is " * 900]
)
def test_odd_texts_are_graded(text):
    assert ShapedGsm8k()(text, task("3")) is not None
    assert ShapedNumber()(text, task("3")) is not None


@pytest.mark.parametrize("grade", [Exact(), ShapedNumber(), ShapedGsm8k()])
def test_without_an_answer_there_is_no_grade(grade):
    assert grade("12", task(None)) is None
    assert grade("12", Task("train", 0, 0, {"question": "?"})) is None


def test_an_answer_that_is_no_number_gives_no_grade():
    assert ShapedNumber()("12", task("twelve")) is None
    assert ShapedGsm8k()("12", task("twelve")) is None


def test_exact_ignores_white_space_and_on_demand_case():
    assert Exact()(" 12\n", task("12")) == 1.0
    assert Exact()("Paris", task("paris")) == 0.0
    assert Exact(ignore_case=True)("Paris", task("paris")) == 1.0
    assert Exact(field="text")("x", Task("t", 0, 0, {"text": "x"})) == 1.0
