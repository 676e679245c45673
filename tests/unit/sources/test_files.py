"""JSON Lines files: what is wrong with one is said with file, row and key."""

from __future__ import annotations

import re

import pytest

from astraflow.errors import SourceError
from astraflow.sources.files import JsonlSource
from astraflow.sources.gsm8k import Gsm8kSource
from astraflow.sources.svamp import SvampSource
from hashed import said_by_each


@pytest.fixture
def write(tmp_path):
    def write_(content, **options):
        path = tmp_path / "tasks.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return JsonlSource(path=str(path), **options)

    return write_


def test_rows_come_in_file_order_and_duplicates_stay(write):
    source = write('{"question": "a", "n": 1}\n\n{"question": "a", "n": 2.5}\n{"question": "a", "n": 1}\n')
    assert [source.row(i)["n"] for i in range(len(source))] == [1, 2.5, 1]


def test_limit_keeps_the_first_rows_and_changes_the_fingerprint(write):
    content = '{"q": 1}\n{"q": 2}\n{"q": 3}'
    whole, part = write(content), write(content, limit=2)
    assert len(part) == 2
    assert whole.fingerprint() != part.fingerprint()
    assert write('{"q": 1}\n{"q": 2}\n{"q": 4}').fingerprint() != whole.fingerprint()


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", {}, ["tasks.jsonl", "no row"]),
        ("\n \n", {}, ["tasks.jsonl", "no row"]),
        ('{"q": 1}\n{"q": }', {}, ["tasks.jsonl:2", "not JSON"]),
        ('{"q": 1}\n[1]', {}, ["tasks.jsonl:2", "not a JSON object"]),
        (b'{"q": 1}\n{"q": "\xff"}', {}, ["tasks.jsonl:2", "not UTF-8"]),
        ('{"q": "a", "answer": "b"}\n{"q": "a"}', {}, ["row 1", "answer", "missing"]),
        ('{"q": "a"}\n{"q": "  "}', {}, ["row 1", "q", "empty"]),
        ('{"q": "a", "answer": "1"}\n{"q": "a", "answer": null}', {}, ["row 1", "answer", "empty"]),
        ('{"q": "a"}\n{"q": 3}', {}, ["row 1", "q", "number", "row 0", "text"]),
        ('{"q": "a"}', {"required": ["answer"]}, ["row 0", "answer", "missing"]),
        ('{"q": "a"}', {"limit": -2}, ["limit", "-2"]),
    ],
)
def test_what_is_wrong_is_named(write, content, options, words):
    with pytest.raises(SourceError) as error:
        write(content, **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_keys_that_are_not_required_may_be_absent_or_null(write):
    source = write('{"q": "a", "hint": "x"}\n{"q": "b", "hint": null}\n{"q": "c"}', required=["q"])
    assert len(source) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=re.escape(str(tmp_path / "nothing.jsonl"))):
        JsonlSource(path=str(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_every_gsm8k_row_has_a_number_as_answer(split, size):
    source = Gsm8kSource(split=split)
    assert len(source) == size
    for i in range(size):
        row = source.row(i)
        assert re.fullmatch(r"-?\d+(\.\d+)?", row["answer"])
        assert row["question"].strip() and row["solution"] and "####" not in row["solution"]


def test_gsm8k_limit_and_split_are_checked():
    assert len(Gsm8kSource(split="test", limit=7)) == 7
    with pytest.raises(SourceError, match="heldout"):
        Gsm8kSource(split="heldout")


def test_svamp_answers_are_numbers():
    source = SvampSource(split="all")
    assert len(source) == 1000
    for row in (source.row(i) for i in range(len(source))):
        assert re.fullmatch(r"\d+(\.\d+)?", row["answer"]), row
        assert row["kind"] and len(row["question"]) > 20


def test_no_story_of_svamp_is_both_trained_and_held_out():
    def runs(source):
        words = (re.findall(r"[a-z]+", source.row(i)["question"].lower()) for i in range(len(source)))
        return [{tuple(w[i : i + 7]) for i in range(len(w) - 6)} for w in words]

    train, heldout = SvampSource(), SvampSource(split="heldout")
    assert (len(train), len(heldout)) == (800, 200)
    known = set().union(*runs(train))
    assert [i for i, told in enumerate(runs(heldout)) if len(told & known) > len(told) / 3] == []


def test_svamp_limit_and_split_are_checked():
    assert SvampSource(limit=3).fingerprint() != SvampSource(limit=4).fingerprint()
    for options in ({"split": "test"}, {"limit": -1}):
        with pytest.raises(SourceError, match=r"sources\.svamp"):
            SvampSource(**options)


def test_shipped_rows_do_not_depend_on_the_process_or_its_hashes():
    script = (
        "import hashlib; from astraflow.sources.gsm8k import Gsm8kSource\n"
        "from astraflow.sources.svamp import SvampSource\n"
        "for s in (Gsm8kSource(), Gsm8kSource(split='test'), SvampSource(), SvampSource(split='heldout')):\n"
        "    rows = str([s.row(i) for i in range(len(s))])\n"
        "    print(s.fingerprint(), hashlib.sha256(rows.encode()).hexdigest())"
    )
    assert len(said_by_each(script)) == 1
