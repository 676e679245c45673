"""The run files that ship with the project: found by name, listed, copied."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from astraflow.config.env import user_path
from astraflow.errors import Problem

_PACKAGE = Path(__file__).resolve().parents[1]
_ON, _NEEDS = " on two cores", "needs "


def recipes_dir() -> Path:
    """Inside an installed package, else at the root of the repository."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, in order."""
    return sorted(path.stem for path in recipes_dir().glob("*.toml"))


def recipe_path(name_or_path: str) -> Path:
    """A file if there is one, else the shipped recipe of that name.

    Raises: Problem: with the nearest name, or the run file in a directory.
    """
    path = user_path(name_or_path)
    if path.is_file():
        return path
    if name_or_path and path.is_dir():
        own = [file for file in (path / "run.resolved.json", *sorted(path.glob("*.toml"))) if file.is_file()]
        fix = f"give a file in it, such as {own[0]}" if own else "give a run file, or a name of `astraflow recipes`"
        raise Problem("recipe", name_or_path, "is a directory", fix)
    shipped = recipes_dir() / f"{name_or_path}.toml"
    if path.name == name_or_path and shipped.is_file():
        return shipped
    names = recipe_names()
    near = difflib.get_close_matches(path.stem, names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"shipped recipes: {', '.join(names)}"
    raise Problem("recipe", name_or_path, "is neither a file nor a shipped recipe", hint)


@dataclass(frozen=True)
class About:
    """What a run file says of itself: `description = "<what>; <time> on two cores; needs <what it needs>"`."""

    what: str
    takes: str = ""  # on two cores without other work
    needs: str = ""  # beside `make setup`


def about(path: Path) -> About:
    """Of a run file; without a description its first comment says what it is."""
    text = path.read_text(encoding="utf-8")
    said = str(tomllib.loads(text).get("run", {}).get("description", ""))
    parts = [part.strip() for part in said.split(";")]
    takes = next((part.removesuffix(_ON) for part in parts if part.endswith(_ON)), "")
    needs = next((part.removeprefix(_NEEDS) for part in parts if part.startswith(_NEEDS)), "")
    rest = [part for part in parts if part and not part.endswith(_ON) and not part.startswith(_NEEDS)]
    comment = text.partition("\n")[0].removeprefix("#").strip() if text.startswith("#") else ""
    return About("; ".join(rest) or comment, takes, needs)


def examples_dir() -> Path | None:
    """The examples of a checkout; an installed package has none."""
    found = recipes_dir().with_name("examples")
    return found if found.is_dir() else None


def examples() -> list[Path]:
    """Run files of the examples, in order. Each is run from its own folder, where its modules are."""
    place = examples_dir()
    return sorted(place.rglob("*.toml")) if place is not None else []
