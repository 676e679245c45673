"""Sources of code: rows, splits, files of contests, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import SourceError
from astraflow.sources.code.humaneval import HumanEvalSource
from astraflow.sources.code.mbpp import MbppSource
from astraflow.sources.code.programs import ProgramsSource
from astraflow.sources.code.snippets import SnippetsSource

FIELDS = {"question", "entries", "header", "stub", "setup", "given", "tests", "solution"}


def test_humaneval_gives_helpers_of_the_question_to_tests() -> None:
    source = HumanEvalSource()
    rows = [source.row(index) for index in range(len(source))]
    assert len(rows) == 164 and all(set(row) >= FIELDS for row in rows)
    zeros = rows[32]
    assert zeros["entries"] == ["find_zero"] and "def poly(" in zeros["setup"] and "find_zero" not in zeros["setup"]
    assert zeros["tests"] == ["check(find_zero)"] and zeros["stub"] in zeros["solution"]


def test_mbpp_has_its_splits_and_shows_few_tests() -> None:
    sizes = {split: len(MbppSource(split=split)) for split in ("prompt", "test", "validation", "train", "all")}
    assert sizes == {"prompt": 10, "test": 500, "validation": 90, "train": 374, "all": 974}
    row = MbppSource(split="all").row(600)
    assert row["id"] == 601 and row["entries"] == ["Pair", "max_chain_length"]
    assert row["tests"][0] in row["question"] and row["tests"][1] not in row["question"]
    assert MbppSource(split="all").row(595)["setup"] == "import sys"
    assert MbppSource(shown=3).fingerprint() != MbppSource().fingerprint()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"code": "def f(:"}, "task 700.* is not Python"),
        ({"code": "x = 1"}, "task 700.* names nothing that `code` defines"),
        ({"test_list": None}, "row 0: test_list=None is empty"),
        ({"test_list": [1]}, r"row 0: test_list=\[1\] must be a list of texts"),
        ({"task_id": "7"}, "row 0: task_id=7 must be a whole number"),
        ({"code": 1}, "row 0: code=1 must be a text"),
    ],
)
def test_a_broken_row_of_mbpp_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    whole = {"task_id": 700, "text": "t", "code": "def f(): pass", "test_list": ["f()"], "test_setup_code": ""} | row
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(whole))
    with pytest.raises(SourceError, match=message):
        MbppSource(path=str(path))
    path.write_text(json.dumps({"task_id": 700, "text": "t", "code": "def f(): pass", "test_list": ["f()"]}))
    assert MbppSource(path=str(path)).row(0)["given"] == ""  # which may lack


def write(tmp_path: Path, **fields: Any) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"question": "q", **fields}))
    return str(path)


def test_programs_and_functions_of_contests(tmp_path: Path) -> None:
    path = write(tmp_path, input_output=json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}))
    assert ProgramsSource(path=path).row(0)["cases"] == [["1\n", "2\n"], ["2\n", "3\n"]]
    assert ProgramsSource(path=path, max_cases=1).row(0)["cases"] == [["1\n", "2\n"]]
    path = write(
        tmp_path, input_output={"inputs": [[1, [2]]], "outputs": [3], "fn_name": "add"}, starter_code="class Solution:"
    )
    row = ProgramsSource(path=path).row(0)
    assert row["tests"] == ["assert same(add(*[1, [2]]), 3)"] and row["entries"] == ["add"] and not row["cases"]
    assert row["question"].endswith("```python\nclass Solution:\n```")
    public = json.dumps([{"input": '[1]\n"a"', "output": "[2]", "testtype": "functional"}])
    path = write(tmp_path, public_test_cases=public, metadata=json.dumps({"func_name": "g"}))
    row = ProgramsSource(path=path, tests="public_test_cases").row(0)
    assert row["tests"] == ["assert same(g(*[[1], 'a']), [2])"]


@pytest.mark.parametrize(
    ("got", "given", "wanted", "right"),
    [
        (3, [1], [3], True),  # as APPS may write it
        ([3], [1], [3], True),
        ((3,), [1], [3], True),
        (4, [1], [3], False),
        ([3, 4], [1], [3, 4], True),
        (3, [1], [3, 4], False),
        (3, "1", "[3]", False),  # LiveCodeBench writes what it means
        (float("inf"), "Infinity", "Infinity", True),
    ],
)
def test_what_a_function_of_a_contest_may_return(
    tmp_path: Path, got: Any, given: Any, wanted: Any, right: bool
) -> None:
    tests = {"inputs": [given], "outputs": [wanted], "fn_name": "f"}
    row = ProgramsSource(path=write(tmp_path, input_output=json.dumps(tests))).row(0)
    space: dict[str, Any] = {"f": lambda x: got}
    exec(row["setup"], space)  # noqa: S102 - our own
    if right:
        exec(row["tests"][0], space)  # noqa: S102 - our own
    else:
        with pytest.raises(AssertionError):
            exec(row["tests"][0], space)  # noqa: S102 - our own


@pytest.mark.parametrize("name", ["f(); import os", 3, "lambda"])
def test_what_is_no_name_of_a_function_is_refused(tmp_path: Path, name: Any) -> None:
    tests = {"inputs": [[1]], "outputs": [1], "fn_name": name}
    with pytest.raises(SourceError, match=r"p\.jsonl row 0: fn_name=.* is no name"):
        ProgramsSource(path=write(tmp_path, input_output=json.dumps(tests)))


@pytest.mark.parametrize(
    "broken",
    [
        '{"inputs": [null], "outputs": ["1"]}', '{"inputs": [1], "outputs": []}', '{"inputs": []}', "{", "[]", "3",
        "[" * 10**5,
    ],
)  # fmt: skip
def test_broken_cases_are_named_before_anything_starts(tmp_path: Path, broken: str) -> None:
    with pytest.raises(SourceError, match=r"p\.jsonl row 0: input_output"):
        ProgramsSource(path=write(tmp_path, input_output=broken))


@pytest.mark.parametrize("kind", ["sums", "lists"])
def test_snippets_hold_out_a_fifth_and_say_what_their_code_does(kind: str) -> None:
    parts = {split: SnippetsSource(kind=kind, split=split) for split in ("train", "heldout", "all")}
    words = {split: {source.row(i)["brief"] for i in range(len(source))} for split, source in parts.items()}
    assert words["train"].isdisjoint(words["heldout"]) and words["train"] | words["heldout"] == words["all"]
    assert len(words["heldout"]) == len(words["all"]) // 5 == len(parts["all"]) // 5
    row = parts["train"].row(3)
    assert set(row) >= FIELDS and len(row["tests"]) == 5
    space: dict[str, Any] = {}
    exec(row["solution"] + "\n".join(row["tests"]), space)  # noqa: S102 - our own


def test_demonstrations_are_of_train_problems_and_right_as_often_as_said() -> None:
    source = SnippetsSource(demos=True, right=0.5, size=2000)
    asked = {row["brief"]: row for row in (SnippetsSource().row(i) for i in range(len(SnippetsSource())))}
    right = 0
    for index in range(len(source)):
        question, answer = (message["content"] for message in source.row(index)["messages"])
        row = asked[question.removesuffix("?")]
        right += row["solution"] == f"{row['stub']}{answer}\n"
    assert 0.45 < right / 2000 < 0.56


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SnippetsSource(kind="x"), r"snippets\.kind=x is not known; use one of: sums, lists"),
        (lambda: SnippetsSource(right=2.0), r"snippets\.right=2.0 must be a share"),
        (lambda: MbppSource(split="x"), r"mbpp\.split=x must be one of"),
        (lambda: MbppSource(shown=0), r"mbpp\.shown=0 must be >= 1"),
        (lambda: HumanEvalSource(limit=-1), r"humaneval\.limit=-1 must be >= 0"),
    ],
)
def test_wrong_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        make()
