r"""Answers: where a reply says them, and which forms of them are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.answers import last_boxed
from astraflow.rewards.math.forms import number, plain, same

TABLE = Path(__file__).parents[3] / "support" / "answer_forms.jsonl"
FORMS = [json.loads(line) for line in TABLE.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a_{b_{c}}} and {x}", "a_{b_{c}}"), (r"\boxed {7}", "7"), (r"\fbox{7}", "7"),
        (r"\boxed{\boxed{5}}", "5"), (r"\boxed{x=\boxed{5}}", "5"), (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"$\boxed{ 3 }$", "3"), (r"{ \boxed{5}", "5"), (r"} \boxed{5}", "5"), (r"\boxed{}", ""),
        (r"\boxed{3} \boxed{4", "3"), (r"\boxed{4", None), (r"\boxed 4", None), ("42", None), ("", None),
        (r"\\boxed{5}", None), ("\\boxed{4\n}", "4"), (r"\boxed{a\}", None),
    ],
)  # fmt: skip
def test_the_last_closed_box_is_the_answer(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed{1}", "{", "}", "\\", r"\boxed", r"\boxed{{}"])
def test_floods_of_boxes_take_linear_time(piece):
    flood = piece * (1_000_000 // len(piece))
    assert last_boxed(flood + "\\boxed{7}") in ("7", None)  # a quadratic search would take hours


@given(st.text(alphabet="\\boxed{}1 \n", max_size=60))
def test_any_text_is_searched(text):
    found = last_boxed(text)
    assert found is None or found in text


@pytest.mark.parametrize("row", FORMS, ids=lambda row: f"{row['gold']} ~ {row['answer']}")
def test_forms_never_contradict_the_table(row):
    assert same(row["gold"], row["answer"]) in (row["right"], None)


def test_forms_decide_what_most_answers_look_like():
    numbers = [r for r in FORMS if number(plain(r["gold"])) is not None and number(plain(r["answer"])) is not None]
    undecided = [r for r in numbers if same(r["gold"], r["answer"]) is None]
    assert len(numbers) > 120 and {r["kind"] for r in undecided} <= {"rounding"}


@given(st.integers(-(10**15), 10**15))
def test_every_usual_form_of_an_integer_is_that_integer(value):
    sign, digits = "-" * (value < 0), f"{abs(value):,}"
    for form in (f"{value}", f"{sign}{digits}", f"${value}$", f"{value}.", f"{value}.00", f"\\text{{{value}}}",
                 f"{value} apples", f"{value}\\text{{ cm}}", f"\\frac{{{value * 3}}}{{3}}", f"{value}/1"):  # fmt: skip
        assert same(str(value), form) is True, form
        assert same(str(value + 1), form) is False, form


@given(st.integers(-999, 999), st.integers(1, 999))
def test_every_usual_form_of_a_fraction_is_that_fraction(top, bottom):
    gold = f"\\frac{{{top}}}{{{bottom}}}"
    for form in (f"{top}/{bottom}", f"\\dfrac{{{2 * top}}}{{{2 * bottom}}}", f"\\left.{top} / {bottom}\\right."):
        assert same(gold, form) in (True, None), form
    assert same(gold, f"{top}/{bottom + 1}") is (top == 0)


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_two_texts_are_compared(gold, answer):
    assert same(gold, answer) in (True, False, None)
    assert plain(plain(answer)) == plain(answer) or answer.count("$") > 1 or "\\" in answer or "." in answer


@pytest.mark.parametrize("text", ["9" * 5000, "1/" + "9" * 5000, "\\frac{" + "1" * 100 + "}{3}", "٤٢", "4²", "1 000 0"])
def test_what_is_no_usual_number_is_none(text):
    assert number(plain(text)) is None
