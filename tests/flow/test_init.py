"""What `astraflow init` makes learns: a shorter run of each project. The start itself is tested in test_readme.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from astraflow.scaffold.project import KINDS, create

STEPS, ENDS = 24, 4


@pytest.fixture
def place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a project, in which this process is; what it loads from there is forgotten."""
    place = tmp_path / "mine"
    create(place, kind)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))
    loaded = set(sys.modules)
    yield place
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(place)):
            del sys.modules[name]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_learns_from_its_folder(place: Path, run: Callable[..., Any]) -> None:
    ended = run(place, "run.toml", f"--run.steps={STEPS}", "--evaluation=none")
    assert ended.code == 0, ended.words()
    rewards = [row["reward/mean"] for row in ended.steps() if row["policy"] == "actor"]
    assert len(rewards) == STEPS
    assert mean(rewards[-ENDS:]) > mean(rewards[:ENDS]) + 0.1, rewards
