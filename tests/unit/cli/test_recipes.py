"""`astraflow recipes`: what ships is valid, listed and copied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from astraflow.cli.app import main
from astraflow.cli.run import open_run
from astraflow.config.recipes import about, examples, examples_dir, recipe_names, recipe_path
from command_line import failing


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_says_what_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", name]) == 0
    assert f"{name} is valid" in capsys.readouterr().out
    assert open_run(name, []).run.name == name
    assert main(["recipes"]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith(f"{name} ")]
    said = about(recipe_path(name))
    assert said.takes and said.takes in line and len(said.what) > 20 and said.what in line
    assert f"needs {said.needs}" in line if said.needs else "; needs" not in line


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_needs_beside_the_usual(name: str) -> None:
    text, needs = recipe_path(name).read_text(), about(recipe_path(name)).needs
    assert ("smollm2" in needs) == ('model = "smollm2' in text)
    assert ("sandbox" in needs) == bool(re.search(r'reward = "?.*\bcode\b|"coder_tester"', text))


def test_examples_are_listed_with_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "teams/verifier.toml" in out and str(examples_dir()) in out
    assert all(about(path).what for path in examples())


def test_recipes_are_shown_and_copied(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "show", "quickstart"]) == 0
    shown = capsys.readouterr().out
    assert main(["recipes", "copy", "quickstart"]) == 0
    assert (tmp_path / "quickstart.toml").read_text() == shown
    assert "already exists" in failing(["recipes", "copy", "quickstart"], capsys, 1)
