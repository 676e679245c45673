"""Answers compared by their words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.retrieval.answers import accepted_of, exact_match, f1, final_answer, normalised
from astraflow.rewards.answers import F1, ExactMatch
from astraflow.types import Task

TASK = Task("t", 0, 0, {"answers": ["The Red Harbor", "Red Harbour"]})


@pytest.mark.parametrize(
    ("said", "same", "alike"),
    [
        ("the red harbor", 1, 1), ("Red Harbor!", 1, 1), ("  red   HARBOUR ", 1, 1), ("harbor", 0, 2 / 3),
        ("red harbor in the north", 0, 2 * 2 / (2 + 4)), ("red red harbor", 0, 4 / 5), ("blue", 0, 0), ("", 0, 0),
        ("<answer>red harbor</answer>", 1, 1), ("<think>blue</think><answer>Red Harbor", 1, 1),
        ("<answer>blue</answer> no, <answer>red harbor</answer>", 1, 1), ("red harbor <answer>blue</answer>", 0, 0),
    ],
)  # fmt: skip
def test_exact_match_and_f1_of_several_accepted_answers(said, same, alike):
    for reward, wanted in ((ExactMatch(), same), (F1(), alike)):
        outcome = reward(said, TASK)
        assert outcome.reward == pytest.approx(wanted)
        assert outcome.metrics == {"success": same, "f1": pytest.approx(alike)}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("A U.S. film", "us film"),
        ("1924-02-23", "19240223"),
        ("\uff32\uff45\uff44", "red"),
        ("Straße", "STRASSE"),
        ("“Yes”", "yes"),
        ("Švěrák", "sverak"),
    ],
)
def test_what_counts_as_equal(a, b):
    assert normalised(a) == normalised(b)


@pytest.mark.parametrize(("said", "gold"), [("The", "the"), ("!", "!"), ("an", "An")])
def test_an_answer_of_articles_or_signs_is_still_an_answer(said, gold):
    assert exact_match(said, [gold]) == 1 and exact_match("", [gold]) == 0


@given(st.text(), st.lists(st.text(), max_size=3))
def test_grades_are_from_0_to_1_and_one_is_one(said, accepted):
    assert 0 <= f1(said, accepted) <= 1
    if exact_match(said, accepted) and normalised(said):
        assert f1(said, accepted) == 1


def test_a_task_without_answers_is_unscored():
    assert ExactMatch()("x", Task("t", 0, 0, {"question": "?"})) is None
    assert F1()("x", Task("t", 0, 0, {"answers": []})) is None


def test_the_field_may_have_another_name_and_one_answer():
    assert ExactMatch(field="gold")("x", Task("t", 0, 0, {"gold": "X"})).reward == 1
    assert ExactMatch()("7", Task("t", 0, 0, {"answer": 7})).reward == 1
    with pytest.raises(ValueError, match="must be a text or a list of texts"):
        accepted_of({"answers": [{"x": 1}]}, "answers")


def test_the_final_answer_of_a_plain_reply_is_all_of_it():
    assert final_answer(" Ana Cole ") == "Ana Cole"
