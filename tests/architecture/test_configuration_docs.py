"""Every leaf of the run file is in docs/configuration.md with its default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from astraflow.config.schema import Component, RunConfig

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "configuration.md"


def model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := model_of(a)) is not None), None)


def shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "needed"
    if isinstance(default, Component) and not default.options:
        default = default.type
    if isinstance(default, list) and all(isinstance(d, Component) for d in default):
        default = [d.type for d in default]
    return "none" if default is None else f"`{json.dumps(default)}`"


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path (`*`: any name, `[]`: each entry) and default of every setting."""
    for name, field in model.model_fields.items():
        inner, where = model_of(field.annotation), f"{prefix}{name}"
        if inner is None or inner is Component:
            many = ".*" if str(field.annotation).startswith("dict") else ""
            yield where + many, shown(field.default)
        elif str(field.annotation).startswith("dict"):
            yield from leaves(inner, f"{where}.*.")
        elif str(field.annotation).startswith("list"):
            yield from leaves(inner, f"{where}[].")
        else:
            yield from leaves(inner, f"{where}.")


def test_every_setting_is_documented_with_its_default() -> None:
    text = DOC.read_text()
    missing = [f"| `{where}` | {default} |" for where, default in leaves(RunConfig)]
    missing = [row for row in missing if row not in text]
    assert not missing, "docs/configuration.md lacks or has another default for:\n" + "\n".join(missing)


def test_no_setting_is_documented_that_does_not_exist() -> None:
    known = {where for where, _ in leaves(RunConfig)}
    rows = [line.split("`")[1] for line in DOC.read_text().splitlines() if line.startswith("| `") and "." in line]
    settings = [r for r in rows if r.split(".")[0].split("[")[0] in RunConfig.model_fields]
    assert not sorted(set(settings) - known)


def test_every_name_of_every_room_is_documented() -> None:
    from astraflow.config.rooms import ROOMS

    text = DOC.read_text()
    missing = [f"{room}: {name}" for room, table in ROOMS.items() for name in table if f"`{name}`" not in text]
    assert not missing
