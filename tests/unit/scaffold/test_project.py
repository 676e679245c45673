"""Projects of `astraflow init`: what is written, what is refused, and that their own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from astraflow.cli.app import main
from astraflow.scaffold.project import KINDS, create

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_project_is_its_template_under_its_own_name(kind: str, tmp_path: Path) -> None:
    files = create(tmp_path / "fruit.v2", kind)
    assert set(files) >= {"README.md", "pytest.ini", "run.toml", "tasks.py"}
    assert any(file.startswith("test_") for file in files)
    assert sorted(path.name for path in (tmp_path / "fruit.v2").iterdir()) == files
    run = tomllib.loads((tmp_path / "fruit.v2" / "run.toml").read_text())
    assert run["run"]["name"] == "fruit.v2"
    text = (tmp_path / "fruit.v2" / "README.md").read_text()
    assert text.startswith("# fruit.v2\n") and "runs/fruit.v2" in text and "my-agent" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_of_a_project_pass_from_its_folder(kind: str, tmp_path: Path) -> None:
    """Also inside of a repository whose own settings for pytest would refuse them."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib', '-x']\n")
    create(tmp_path / "mine", kind)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path / "mine", env=environment,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["3x"], 2, "name=3x must begin with a letter"),
        (["a b"], 2, "name=a b must begin with a letter"),
        (["."], 1, "exists already"),
        (["there"], 1, "exists already; give another name, or remove it first"),
        (["nowhere/mine"], 1, "cannot be made"),
        (["mine", "--like=tem"], 2, "did you mean 'team'? known: tool_use, single_turn, team"),
    ],
)
def test_what_cannot_be_made_is_one_sentence_and_leaves_nothing(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place = tmp_path / "place"
    (place / "there").mkdir(parents=True)
    monkeypatch.chdir(place)
    assert main(["init", *words]) == code
    assert said in capsys.readouterr().err
    assert [path.name for path in place.rglob("*")] == ["there"]


def test_what_is_said_leads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    out = capsys.readouterr().out
    assert "wrote mine: README.md" in out and "cd mine" in out and "astraflow run run.toml" in out
    assert "--like single_turn or team" in out
