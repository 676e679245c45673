"""Fields of a task from a row of any shape, and its answer from however the data set writes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from astraflow.answers import last_boxed
from astraflow.errors import SourceError

AnswerForm = Literal["text", "number", "boxed", "hashes"]
ANSWER_FORMS: tuple[AnswerForm, ...] = ("text", "number", "boxed", "hashes")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?", re.ASCII)
_HASHES = "####"


def picked(row: Mapping[str, Any], path: str, where: str, field: str) -> Any:
    """The value at `path`: keys and places of lists with dots between them (`prompt.0.content`); JSON text on the way
    is read. Raises: SourceError: it is missing; names what there is."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            value = _json(value, where, field, path)
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise SourceError(f"{where}: {field}", path, f"is missing at '{part}'", f"there is {_known(value)}")
    return value


def _known(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "nothing"
    return f"a list of {len(value)}" if isinstance(value, list) else f"the value {str(value)[:60]!r}"


def _json(value: str, where: str, field: str, path: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{where}: {field}", value[:80], f"is no JSON ({error})", f"mend it, or change {path}"
        ) from error


def answer_of(value: Any, form: AnswerForm, where: str, field: str) -> str:
    """The answer as text. Raises: SourceError: it is not of that form."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise SourceError(
            f"{where}: {field}", str(value)[:80], "is neither text nor a number", "map it to one by `fields`"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise SourceError(f"{where}: {field}", value, "is no number", "fill it in or remove the row")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if form == "boxed":
        return _found(last_boxed(text), text, where, field, "\\boxed{} that is closed", form)
    if form == "hashes":
        mark = text.rpartition(_HASHES)
        return _found(mark[2].strip() if mark[1] else None, text, where, field, _HASHES, form)
    if form == "number":
        plain = text.strip("$ ").replace("\u2212", "-")
        if not plain.strip("+-") or not _NUMBER.fullmatch(plain):
            raise SourceError(
                f"{where}: {field}", text[:80], "is no number", "use answer = 'text' for answers of any kind"
            )
        return plain.replace(",", "").removeprefix("+")
    return text


def _found(answer: str | None, text: str, where: str, field: str, mark: str, form: str) -> str:
    if not answer:
        raise SourceError(
            f"{where}: {field}", text[-80:], f"holds no {mark} with an answer",
            f"mend the row, or use another form than answer = '{form}'",
        )  # fmt: skip
    return answer
