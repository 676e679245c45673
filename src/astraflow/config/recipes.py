"""The run files that ship with the project: found by name, listed, copied."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

from astraflow.errors import LaunchError

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes_dir() -> Path:
    """Inside an installed package, else at the root of the repository."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, in order."""
    return sorted(path.stem for path in recipes_dir().glob("*.toml"))


def recipe_path(name_or_path: str) -> Path:
    """A file if there is one, else the shipped recipe of that name.

    Raises: LaunchError with the nearest name.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    shipped = recipes_dir() / f"{name_or_path}.toml"
    if path.name == name_or_path and shipped.is_file():
        return shipped
    names = recipe_names()
    near = difflib.get_close_matches(path.stem, names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"shipped recipes: {', '.join(names)}"
    raise LaunchError("recipe", name_or_path, "is neither a file nor a shipped recipe", hint)


def description(path: Path) -> str:
    """What a recipe says of itself."""
    run = tomllib.loads(path.read_text(encoding="utf-8")).get("run", {})
    return str(run.get("description", ""))
