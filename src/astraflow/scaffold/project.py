"""A folder with an agent, tasks, a run file and tests: a copy of a template, which is a project of that kind itself."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from astraflow.errors import LaunchError, Problem

KINDS: Mapping[str, str] = {
    "tool_use": "an environment with a tool, played by a built-in workflow",
    "single_turn": "an agent of your own: one question, one reply, one reward",
    "team": "two policies that learn together, each from its own reward",
}
_TEMPLATES = Path(__file__).parent / "templates"
_NAME = "my-agent"  # of the templates
_NAMED = ("README.md", "run.toml")
_RULE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")  # of run.name, which it becomes


def create(place: Path, kind: str) -> list[str]:
    """Make `place` a project of that kind; gives the names of its files.

    Raises: Problem: an unknown kind, or a name that no run can have. LaunchError: it exists, or cannot be written.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise Problem("--like", kind, "is not a kind of project", f"{hint}known: {', '.join(KINDS)}")
    name = place.resolve().name
    if _RULE.fullmatch(name) is None:
        raise Problem(
            "name", name, "must begin with a letter and have only letters, digits, and . _ -, at most 64",
            "give one like my-agent",
        )  # fmt: skip
    texts = {path.name: path.read_text(encoding="utf-8") for path in files_of(kind)}
    for file in _NAMED:
        texts[file] = texts[file].replace(_NAME, name)
    try:
        place.mkdir()
    except FileExistsError:
        raise LaunchError("name", str(place), "exists already", "give another name, or remove it first") from None
    except OSError as error:
        raise LaunchError(
            "name", str(place), f"cannot be made ({error.strerror})", "give a name in a folder that you may write"
        ) from error
    for file, text in texts.items():
        (place / file).write_text(text, encoding="utf-8")
    return sorted(texts)


def files_of(kind: str) -> list[Path]:
    """The files of a template: its own, and those that all have."""
    found = [path for folder in (_TEMPLATES, _TEMPLATES / kind) for path in folder.iterdir()]
    return [path for path in found if path.is_file() and path.suffix in (".py", ".toml", ".md", ".ini")]
