"""`type = "file.py:Object"`: a component by its file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from astraflow.config.rooms import resolve
from astraflow.errors import Problem


@pytest.fixture(autouse=True)
def _path_as_before() -> None:
    before = list(sys.path)
    yield
    sys.path[:] = before


def test_its_folder_is_searched_for_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "by_file_part.py").write_text("VALUE = 7\n")
    (tmp_path / "by_file.py").write_text("from by_file_part import VALUE\n\ndef play(): return VALUE\n")
    play = resolve("workflows", f"{tmp_path}/by_file.py:play", "workflow.type")
    assert play() == 7
    assert resolve("workflows", f"{tmp_path}/../{tmp_path.name}/by_file.py:play", "workflow.type") is play


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("by_file_nothing.py", None, "there is no file .*by_file_nothing.py"),
        ("by_file_empty.py", "", "has no attribute 'play'"),
        ("json.py", "play = 1", "the name json is taken by"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(Problem, match=said):
        resolve("workflows", f"{tmp_path}/{name}:play", "workflow.type")
