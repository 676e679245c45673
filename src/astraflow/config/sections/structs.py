"""Tables of a run file as the records of whoever uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from astraflow.errors import Problem

S = TypeVar("S", bound=msgspec.Struct)


def struct_of(kind: type[S], options: Mapping[str, Any], where: str, what: str) -> S:
    """A `kind` with `options`; `what`: whose settings they are, for the error.

    Raises: Problem: an unknown key, a wrong type, a value out of range.
    """
    known = kind.__struct_fields__
    for key, value in options.items():
        if key not in known:
            raise Problem(f"{where}.{key}", value, f"is no setting of {what}", f"known: {', '.join(known)}")
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            rule = str(error).split(" - at")[0]
            raise Problem(f"{where}.{key}", value, f"cannot be used ({rule})", "see docs/workloads.md") from error
    return msgspec.convert(dict(options), kind)
