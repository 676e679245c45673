"""Every setting of the run file, walked out of its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from astraflow.config.schema import Component, RunConfig


@pytest.fixture(scope="session")
def settings() -> dict[str, str]:
    """Dotted path (`*`: any name, `[]`: each entry) -> default as docs show it."""
    return dict(leaves(RunConfig))


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
