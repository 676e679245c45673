"""What is wrong with a corpus is said with file, row and key."""

from __future__ import annotations

import gzip
import json

import pytest

from astraflow.errors import Problem, SourceError
from astraflow.retrieval.corpus import Fields, Passage, corpus_path, read_corpus
from small_corpus import ROWS, write_corpus


def read(path, **fields):
    return list(read_corpus(path, Fields(**fields)))


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_rows_come_in_the_order_of_the_file(tmp_path, name):
    assert read(write_corpus(tmp_path / name)) == [Passage(**row) for row in ROWS]


def test_keys_may_have_other_names_and_ids_may_be_numbers(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", [{"url": 7, "contents": "text"}])
    assert read(path, id="url", title="", text="contents") == [Passage("7", "", "text")]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\n{"id": "a", "text": "x"}\r\n\n{"id": "b", "text": "y"}')
    assert [passage.id for passage in read(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "z"', r"c\.jsonl:3=.* is not JSON"),
        ('["z"]', r"c\.jsonl:3=.* is not a JSON object"),
        ('{"title": "t", "text": "x"}', r"c\.jsonl row 2: id=None is missing"),
        ('{"id": "z", "title": "t"}', r"c\.jsonl row 2: text=None is missing"),
        ('{"id": "z", "text": "  "}', r"c\.jsonl row 2: text=   is empty"),
        ('{"id": "", "text": "x"}', r"c\.jsonl row 2: id= is empty"),
        ('{"id": true, "text": "x"}', r"c\.jsonl row 2: id=True is not a text"),
        ('{"id": "z", "text": ["x"]}', r"c\.jsonl row 2: text=\['x'\] is not a text"),
        ('{"id": "z", "title": 3, "text": "x"}', r"c\.jsonl row 2: title=3 is not a text"),
        ('{"id": "a", "text": "again"}', r"c\.jsonl row 2: id=None is that of row 0 too"),
        (json.dumps({"id": "i" * 1001, "text": "x"}), r"c\.jsonl row 2: id=i+\.\.\. has over 1000 characters"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, line, said):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n' + line + "\n")
    with pytest.raises(SourceError, match=said):
        read(path)


def test_a_wrong_encoding_is_named_by_its_line(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": "a", "text": "x"}\n{"id": "b", "text": "\xff"}\n')
    with pytest.raises(SourceError, match=r"c\.jsonl:2=.* is not UTF-8"):
        read(path)


@pytest.mark.parametrize("keep", [20, 200, -4])
def test_a_packed_file_that_was_cut_is_no_shorter_corpus(tmp_path, keep):
    whole = gzip.compress(b"".join(json.dumps({"id": str(i), "text": f"{i * i}"}).encode() + b"\n" for i in range(500)))
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(whole[:keep])
    with pytest.raises(SourceError, match=r"c\.jsonl\.gz:\d+=.* cannot be unpacked"):
        read(path)


def test_a_file_that_is_not_packed_at_all(tmp_path):
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(b'{"id": "a", "text": "x"}\n')
    with pytest.raises(SourceError, match=r"c\.jsonl\.gz:1=.* cannot be unpacked"):
        read(path)


def test_no_row_and_no_file(tmp_path):
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(SourceError, match="holds no row"):
        read(tmp_path / "c.jsonl")
    with pytest.raises(
        SourceError, match=r"corpus=nowhere\.jsonl is neither a file nor a corpus that ships; .*wiki2hop"
    ):
        corpus_path("nowhere.jsonl")
    with pytest.raises(Problem, match="cannot be read"):
        read(tmp_path)


def test_the_shipped_corpus_is_whole():
    passages = read(corpus_path("wiki2hop"))
    assert len(passages) == 6119
    assert [passages[0].id, passages[-1].id] == ["p0", "p6118"]
