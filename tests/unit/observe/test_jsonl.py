from __future__ import annotations

import errno
import logging
import math
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from astraflow.observe.jsonl import JsonlTail, JsonlWriter, read_jsonl, write_whole


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "deep" / "rows.jsonl")
    writer.append({"a": 1, "text": "zwei\nZeilen"})
    writer.append({"x": np.float32(0.5), "n": np.int64(3), "list": np.arange(3), "path": Path("a/b")})
    writer.append({"bad": math.nan})
    writer.close()
    assert read_jsonl(tmp_path / "deep" / "rows.jsonl") == [
        {"a": 1, "text": "zwei\nZeilen"},
        {"x": 0.5, "n": 3, "list": [0, 1, 2], "path": "a/b"},
        {"bad": None},
    ]


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "absent.jsonl") == []
    assert JsonlTail(tmp_path / "absent.jsonl").new_rows() == []


@pytest.mark.parametrize("torn", [b'{"a": 2', b'{"a": 2}', b"\x00\x00"])
def test_a_torn_last_line_harms_no_other(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + torn)
    with caplog.at_level(logging.WARNING):
        assert read_jsonl(path)[0] == {"a": 1}
    writer = JsonlWriter(path)
    writer.append({"a": 3})
    writer.close()
    rows = read_jsonl(path)
    assert rows[0] == {"a": 1}
    assert rows[-1] == {"a": 3}


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    writers = [JsonlWriter(path), JsonlWriter(path)]

    def write(writer: JsonlWriter, who: int) -> None:
        for number in range(200):
            writer.append({"who": who, "number": number, "long": "x" * 500})

    threads = [threading.Thread(target=write, args=(writers[i % 2], i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close()
    rows = read_jsonl(path)
    assert [[r["number"] for r in rows if r["who"] == who] for who in range(4)] == [list(range(200))] * 4


def test_a_tail_gives_each_whole_row_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = JsonlTail(path)
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.new_rows() == [{"a": 1}, {"a": 2}]
    assert tail.new_rows() == []
    with path.open("ab") as file:
        file.write(b': 3}\n{"a": 4}\n')
    assert tail.new_rows() == [{"a": 3}, {"a": 4}]


def test_what_is_no_json_is_an_error(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    with pytest.raises(NotImplementedError, match="cannot be written as JSON"):
        writer.append({"a": object()})
    writer.close()
    assert read_jsonl(tmp_path / "rows.jsonl") == []


def test_a_text_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "status.json"
    write_whole(file, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
