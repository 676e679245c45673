r"""Data sets of others: any shape is mapped, and what is wrong is said with file, row, key and fix."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from astraflow.errors import SourceError
from astraflow.sources.tables.dataset import DatasetSource
from astraflow.sources.tables.fields import answer_of, picked
from hashed import said_by_each

ROWS = [{"question": f"What is {n}+{n}?", "answer": str(2 * n), "id": f"q{n}"} for n in range(5)]
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve {n}", "role": "user"}],
        "reward_model": {"ground_truth": str(n), "style": "rule"},
        "extra_info": {"index": f"i{n % 3}"},
    }
    for n in range(6)
]
DAPO_FIELDS = {"question": "prompt.0.content", "answer": "reward_model.ground_truth"}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.name.partition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "file.arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind.endswith(("gz", "zst")):
        with pa.output_stream(str(path), compression="gzip" if kind.endswith("gz") else "zstd") as sink:
            sink.write(lines(rows))
    else:
        path.write_bytes(lines(rows))
    return path


def rows_of(source):
    return [source.row(i) for i in range(len(source))]


KINDS = ["jsonl", "ndjson", "json", "parquet", "arrow", "file.arrow", "jsonl.gz", "jsonl.zst"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    assert rows_of(DatasetSource(path=str(write(tmp_path / f"t.{kind}", ROWS)))) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_fields_are_found_in_nested_rows(tmp_path, kind):
    source = DatasetSource(path=str(write(tmp_path / f"t.{kind}", DAPO)), fields=DAPO_FIELDS)
    assert rows_of(source) == [{"question": f"Solve {n}", "answer": str(n)} for n in range(6)]


def test_paths_may_go_through_json_text_and_keys_may_hold_dots():
    row = {"a.b": 1, "info": '{"x": [10, {"y": 2}]}'}
    assert picked(row, "a.b", "w", "f") == 1
    assert picked(row, "info.x.1.y", "w", "f") == 2


def test_rows_of_the_same_id_are_refused_or_left_out(tmp_path):
    path = str(write(tmp_path / "t.jsonl", DAPO))
    with pytest.raises(SourceError, match=r"row 3: extra_info.index=i0 is that of .*row 0 too; .*duplicates = 'first'"):
        DatasetSource(path=path, fields=DAPO_FIELDS, id="extra_info.index")
    source = DatasetSource(path=path, fields=DAPO_FIELDS, id="extra_info.index", duplicates="first")
    assert [row["answer"] for row in rows_of(source)] == ["0", "1", "2"]


def test_overlong_prompts_are_refused_or_left_out(tmp_path):
    path = str(write(tmp_path / "t.jsonl", [*ROWS, {**ROWS[0], "question": "x" * 100}]))
    with pytest.raises(SourceError, match=r"row 5: question=100 characters must be at most max_chars = 50; .*'drop'"):
        DatasetSource(path=path, max_chars=50)
    assert len(DatasetSource(path=path, max_chars=50, overlong="drop")) == 5


@pytest.mark.parametrize(
    ("value", "form", "answer"),
    [
        ("12", "text", "12"), (12, "text", "12"), (12.0, "text", "12"), (0.5, "number", "0.5"),
        ("1,234", "number", "1234"),
        (" $5 ", "number", "5"), ("\u22127", "number", "-7"), (r"so \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        ("steps\n#### 42", "hashes", "42"), (r"\frac{1}{2}", "text", r"\frac{1}{2}"),
    ],
)  # fmt: skip
def test_answers_in_every_form(value, form, answer):
    assert answer_of(value, form, "w", "answer") == answer


@pytest.mark.parametrize(
    ("value", "form", "word"),
    [(None, "text", "neither"), (True, "text", "neither"), ([1], "text", "neither"), ("twelve", "number", "no number"),
     ("1,23", "number", "no number"), ("", "number", "no number"), ("-", "number", "no number"),
     ("42", "boxed", "boxed"),
     (r"\boxed{4", "boxed", "boxed"), (r"\boxed{}", "boxed", "boxed"), ("42", "hashes", "####"),
     ("#### ", "hashes", "####")],
)  # fmt: skip
def test_answers_of_another_form_are_refused(value, form, word):
    with pytest.raises(SourceError, match=word):
        answer_of(value, form, "w", "answer")


def test_a_worked_solution_is_kept_beside_its_answer(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"problem": "p", "solution": r"Thus \boxed{7}.", "level": 3}])
    fields = {"question": "problem", "answer": "solution", "level": "level"}
    assert DatasetSource(path=str(path), fields=fields, answer="boxed").row(0) == {
        "question": "p", "answer": "7", "solution": r"Thus \boxed{7}.", "level": 3,
    }  # fmt: skip


def test_a_directory_as_datasets_saves_it(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / split / "data-00000-of-00001.arrow", [{**row, "split": split} for row in ROWS])
        (tmp_path / split / "state.json").write_text("{}")
        (tmp_path / split / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert {row["split"] for row in rows_of(DatasetSource(path=str(tmp_path), split="test"))} == {"test"}


def test_a_directory_as_a_repository_holds_it(tmp_path):
    for part in (1, 0):
        write(tmp_path / "data" / f"train-0000{part}-of-00002.parquet", [{**row, "part": part} for row in ROWS])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("words")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.jsonl").write_text("broken")
    source = DatasetSource(path=str(tmp_path), split="train")
    assert [row["part"] for row in rows_of(source)] == [0] * 5 + [1] * 5
    assert len(DatasetSource(path=str(tmp_path), split="test")) == 1


def test_one_problem_a_file_as_in_math(tmp_path):
    for n in range(3):
        path = tmp_path / "train" / "algebra" / f"{n}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"problem": f"p{n}", "solution": f"\\boxed{{{n}}}"}))
    fields = {"question": "problem", "answer": "solution"}
    source = DatasetSource(path=str(tmp_path), split="train", fields=fields, answer="boxed")
    assert [row["answer"] for row in rows_of(source)] == ["0", "1", "2"]


def cut(path, size=None):
    content = path.read_bytes()
    path.write_bytes(content[: size or len(content) // 2])
    return path


def broken_text(path):
    offsets, letters = pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")
    pq.write_table(pa.table({"question": pa.StringArray.from_buffers(1, offsets, letters)}), path)
    return path


def deep(path):
    path.write_text("[" * 10**5 + "]" * 10**5)
    return path


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda d: d / "none.jsonl", {}, ["none.jsonl", "does not exist"]),
        (lambda d: d, {}, ["holds no file", ".parquet"]),
        (lambda d: write(d / "t.csv", ROWS), {}, ["t.csv", "must end in", ".jsonl"]),
        (lambda d: write(d / "t.jsonl", []), {}, ["t.jsonl", "no row"]),
        (lambda d: write(d / "t.parquet", [{"question": "a"}]), {"fields": {"answer": "gold"}},
         ["t.parquet row 0", "answer=gold", "missing", "there is question"]),
        (lambda d: write(d / "t.jsonl", DAPO), {"fields": {"question": "prompt.3.content"}},
         ["row 0", "question", "missing at '3'", "a list of 1"]),
        (lambda d: write(d / "t.jsonl", [ROWS[0], {**ROWS[1], "answer": None}]), {}, ["row 1", "answer", "neither"]),
        (lambda d: write(d / "t.jsonl", [ROWS[0], {**ROWS[1], "question": " "}]), {}, ["row 1", "question", "empty"]),
        (lambda d: write(d / "t.jsonl", [ROWS[0], {**ROWS[1], "question": 5}]), {},
         ["row 1", "question", "float", "row 0", "str"]),
        (lambda d: write(d / "t.jsonl", [{**ROWS[0], "answer": "x"}]), {"answer": "number"}, ["row 0", "no number"]),
        (lambda d: write(d / "t.parquet", [{"question": b"raw"}]), {}, ["row 0", "question", "bytes"]),
        (lambda d: cut(write(d / "t.parquet", ROWS)), {}, ["t.parquet", "Parquet", "cut"]),
        (lambda d: cut(write(d / "t.arrow", ROWS)), {}, ["t.arrow", "Arrow", "cut"]),
        (lambda d: cut(write(d / "t.jsonl.gz", ROWS)), {}, ["t.jsonl.gz", "unpacked", "cut"]),
        (lambda d: cut(write(d / "t.jsonl.zst", ROWS)), {}, ["t.jsonl.zst", "unpacked", "cut"]),
        (lambda d: cut(write(d / "t.json", ROWS)), {}, ["t.json", "not JSON"]),
        (lambda d: cut(write(d / "t.jsonl", ROWS), 100), {}, ["t.jsonl:2", "not JSON"]),
        (lambda d: write(d / "t.jsonl", [ROWS[0], {"question": "a"}]), {}, ["row 1", "answer", "is missing"]),
        (lambda d: write(d / "t.jsonl", [{"question": "a"}, ROWS[0]]), {}, ["row 0", "answer", "is missing"]),
        (lambda d: write(d / "t.parquet", [{"answer": 1.0}, {"answer": float("nan")}]), {}, ["row 1", "answer=nan"]),
        (lambda d: write(d / "t.parquet", [{"answer": float("-inf")}]), {}, ["row 0", "answer=-inf"]),
        (lambda d: broken_text(d / "t.parquet"), {}, ["t.parquet", "not UTF-8"]),
        (lambda d: deep(d / "t.jsonl"), {}, ["t.jsonl:1", "not JSON"]),
        (lambda d: deep(d / "t.json"), {}, ["t.json", "not JSON"]),
        (lambda d: write(d / "t.jsonl", [{"q": "[" * 10**5}]), {"fields": {"question": "q.0"}}, ["row 0", "no JSON"]),
        (lambda d: write(d / "t.jsonl", DAPO), {"fields": {"question": "prompt.\u00b2"}}, ["row 0", "missing"]),
        (lambda d: write(d / "t.jsonl", [{**ROWS[0], "id": None}]), {"id": "id"}, ["row 0", "id=None", "empty"]),
        (lambda d: write(d / "t.jsonl", ROWS), {"max_chars": 1, "overlong": "drop"},
         ["max_chars=1", "all", "t.jsonl", "raise it"]),
        (lambda d: write(d / "t.jsonl", ROWS), {"limit": -1}, ["limit", "-1"]),
        (lambda d: write(d / "t.jsonl", ROWS), {"answer": "latex"}, ["answer", "latex", "boxed"]),
        (lambda d: write(d / "t.jsonl", ROWS), {"id": "key"}, ["row 0", "id=key", "missing"]),
        (lambda d: write(d / "train-0.jsonl", ROWS).parent, {"split": "dev"}, ["split=dev", "it has train"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, make, options, words):
    with pytest.raises(SourceError) as error:
        DatasetSource(path=str(make(tmp_path)), **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_broken_encoding_and_pointers_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(ROWS[:2]) + b'{"question": "\xff"}\n')
    with pytest.raises(SourceError, match=r"t.jsonl:3.*not UTF-8"):
        DatasetSource(path=str(path))
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(SourceError, match="git lfs pull"):
        DatasetSource(path=str(path))


def test_several_splits_must_be_chosen_from(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", ROWS)
    with pytest.raises(SourceError, match="must be one of test, train"):
        DatasetSource(path=str(tmp_path))


def test_the_fingerprint_changes_with_rows_and_settings(tmp_path):
    path = str(write(tmp_path / "t.jsonl", ROWS))
    first = DatasetSource(path=path).fingerprint()
    assert DatasetSource(path=path).fingerprint() == first
    assert DatasetSource(path=path, limit=2).fingerprint() != first
    assert DatasetSource(path=path, fields={"question": "question", "answer": "id"}).fingerprint() != first
    write(tmp_path / "t.jsonl", ROWS[::-1])
    assert DatasetSource(path=path).fingerprint() != first


def test_packed_json_lines_of_the_standard_library_are_read(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(lines(ROWS[:2])) + gzip.compress(lines(ROWS[2:])))
    assert rows_of(DatasetSource(path=str(path))) == ROWS


def test_rows_are_the_same_in_every_process(tmp_path):
    path = write(tmp_path / "t.parquet", DAPO)
    script = (
        "from astraflow.sources.tables.dataset import DatasetSource\n"
        f"s = DatasetSource(path={str(path)!r}, fields={DAPO_FIELDS!r})\n"
        "print(s.fingerprint(), [s.row(i) for i in range(len(s))])"
    )
    assert len(said_by_each(script)) == 1
