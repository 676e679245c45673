"""A calculation is worked out by the grader; nothing else is ever evaluated."""

from __future__ import annotations

import pytest

from astraflow.rewards.calculation import Calculation

TASK = {"answer": "51", "equation": "( 76.0 - 25.0 )"}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("76 - 25", 1.0),
        (" (76-25) \n", 1.0),
        ("(100 + 2) / 2", 1.0),
        ("17 x 3", 1.0),
        ("17\u00d73", 1.0),
        ("25 - 76", 0.3),
        ("76 + 12", 0.2),
        ("8 - 3", 0.1),
        ("76 - 25 = 51", 0.15),  # right, but not the calculation alone
        ("The answer is 8 - 3.", 0.05),
        ("51", 0.0),  # a number is no calculation
        ("76 / (25 - 25)", 0.1),  # 25 - 25 stands in it
        ("76 -", 0.0),
        ("(76 - 25", 0.15),
        ("76 25", 0.0),
        ("-76 + 127", 0.1),  # no signs of numbers; what is within counts by half, up to a bound
        ("__import__('os')", 0.0),
        ("", 0.0),
        ("1" * 50 + "+1", 0.0),
        ("1+" * 150 + "1", 0.0),
        ("9 ** 9", 0.0),
    ],
)
def test_grades(reply, reward):
    assert Calculation()(reply, TASK).reward == pytest.approx(reward)
    assert Calculation()(reply, TASK).metrics["success"] == float(reward == 1.0)


def test_without_an_answer_nothing_is_graded():
    assert Calculation()("1 + 1", {"question": "?"}) is None
    assert Calculation()("1 + 1", {"answer": "many"}) is None
    assert Calculation()("1 + 1", {"answer": "2"}).reward == 1.0
    assert Calculation()("1 + 2", {"answer": "2"}).reward == pytest.approx(0.1)


def test_fractions_are_exact():
    assert Calculation()("1 / 3 * 3", {"answer": "1"}).reward == 1.0
    assert Calculation()("0.1 + 0.2", {"answer": "0.3"}).reward == 1.0
