"""The directory of an evaluation: what was played stays, what would mix two evaluations is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import ConfigError, LaunchError
from astraflow.launch.evaluation.journal import EpisodeRow, open_journal

SETTINGS = {"samples": 2, "temperature": 1.0, "workflow": {"type": "single_turn", "options": {"n": 1}}}
SIDES = {"a": {"actor": {"weights": "1"}}}


def row(sample: int = 0, side: str = "a", **changes: Any) -> EpisodeRow:
    told: dict[str, Any] = {"success": 1.0, "reward": 1.0} | changes
    return EpisodeRow(side=side, source="held", row=3, sample=sample, **told)


def test_what_is_kept_is_there_again(tmp_path: Path) -> None:
    with open_journal(tmp_path / "e", SETTINGS, SIDES) as journal:
        journal.add(row(1))
        journal.add(row(0, success=None, reward=None, error="timeout: slow"))
        journal.add(row(1, success=0.0))  # a second one of the same key
    with open_journal(tmp_path / "e", SETTINGS, SIDES) as journal:
        assert ("a", "held", 3, 1) in journal and ("a", "held", 3, 2) not in journal
        assert [(r.sample, r.success, r.error) for r in journal.rows("a")] == [
            (0, None, "timeout: slow"),
            (1, 1.0, None),
        ]


def test_a_row_that_a_kill_tore_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_journal(tmp_path, SETTINGS, SIDES) as journal:
        journal.add(row(0))
        journal.add(row(1))
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    with open_journal(tmp_path, SETTINGS, SIDES) as journal:
        assert [r.sample for r in journal.rows("a")] == [0]
        journal.add(row(1))
    with open_journal(tmp_path, SETTINGS, SIDES) as journal:
        assert [r.sample for r in journal.rows("a")] == [0, 1]


def test_a_changed_setting_is_refused_by_name(tmp_path: Path) -> None:
    with open_journal(tmp_path, SETTINGS, SIDES) as journal:
        journal.add(row())
    before = (tmp_path / "settings.json").read_text()
    changed = SETTINGS | {"samples": 4, "workflow": {"type": "single_turn", "options": {"n": 2}}}
    with pytest.raises(ConfigError) as refused, open_journal(tmp_path, changed, {"a": {"actor": {"weights": "2"}}}):
        pass
    said = str(refused.value)
    assert "3 problems" in said and "samples=4 must stay 2" in said and "workflow.options.n=2 must stay 1" in said
    assert 'model a: actor.weights="2" must stay "1"' in said
    assert (tmp_path / "settings.json").read_text() == before


def test_another_format_is_refused_by_name_and_none_is_the_first(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    for form, begins in ((None, True), (2, False)):
        with open_journal(tmp_path, SETTINGS, SIDES):
            pass
        said = json.loads(file.read_text())
        assert said.pop("format") == 1
        file.write_text(json.dumps(said if form is None else said | {"format": form}))
        if not begins:
            with pytest.raises(LaunchError, match=r"evaluation\.format=2 must be 1; use the AstraFlow version"):
                open_journal(tmp_path, SETTINGS, SIDES).__enter__()


def test_another_side_may_join_and_one_may_stay_away(tmp_path: Path) -> None:
    with open_journal(tmp_path, SETTINGS, SIDES) as journal:
        journal.add(row())
    other = {"b": {"actor": {"weights": "7"}}}
    with open_journal(tmp_path, SETTINGS, other) as journal:
        journal.add(row(side="b"))
        assert len(journal.rows("a")) == len(journal.rows("b")) == 1
    assert set(json.loads((tmp_path / "settings.json").read_text())["sides"]) == {"a", "b"}


def test_nobody_else_works_there_meanwhile(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path, SETTINGS, SIDES),
        pytest.raises(LaunchError, match="is in use by another evaluation"),
        open_journal(tmp_path, SETTINGS, SIDES),
    ):
        pass


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(LaunchError, match="holds something else"), open_journal(tmp_path, SETTINGS, SIDES):
        pass
    with pytest.raises(LaunchError, match="holds something else"), open_journal(tmp_path / "mine.txt", SETTINGS, SIDES):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
