"""Tasks from JSON Lines files. Everything that can be wrong with a file is found here, before any engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from astraflow.config.env import user_path
from astraflow.errors import SourceError
from astraflow.sources.splits import check_row

_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_MISSING = object()


def load_jsonl(path: Path, required: Sequence[str] = ()) -> tuple[list[dict[str, Any]], str]:
    """All rows of `path` and a fingerprint of its bytes. Rows are counted from 0, lines from 1.

    Every row must hold each `required` key (none given: the keys of the first row), neither null nor blank, and a key
    has one kind of value throughout the file.

    Raises: SourceError: names the file, the row and the key.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError("path", str(path), f"cannot be read ({error.strerror})", "name a JSON Lines file") from error
    rows = parse_lines(path, content)
    if not rows:
        raise SourceError("path", str(path), "holds no row", "write one JSON object a line")
    _check_rows(path, rows, tuple(required) or tuple(rows[0]))
    return rows, xxhash.xxh3_64_hexdigest(content)


def parse_lines(path: Path, content: bytes) -> list[dict[str, Any]]:
    """One JSON object a line, blank lines left out. Raises: SourceError: names the line."""
    lines = text_of(path, content).split("\n")
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def text_of(path: Path, content: bytes) -> str:
    """Raises: SourceError: it is not UTF-8; names the line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError(f"{path}:{line}", error.reason, "is not UTF-8", "save the file as UTF-8") from error


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(f"{path}:{number}", line, f"is not JSON ({error})", "write one JSON object a line") from error
    if not isinstance(row, dict):
        raise SourceError(f"{path}:{number}", line, "is not a JSON object", 'write {"key": value, ...} on each line')
    return row


def _check_rows(path: Path, rows: list[dict[str, Any]], required: tuple[str, ...]) -> None:
    kinds: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(rows):
        where = f"{path} row {number}"
        for key in required:
            value = row.get(key, _MISSING)
            if value is _MISSING:
                raise SourceError(f"{where}: {key}", None, "is missing", "every row needs this key; see `required`")
            if value is None or (isinstance(value, str) and not value.strip()):
                raise SourceError(f"{where}: {key}", value, "is empty", "fill it in or remove the row")
        for key, value in row.items():
            if value is None:
                continue
            kind = _KINDS[type(value)]
            seen, first = kinds.setdefault(key, (kind, number))
            if kind != seen:
                raise SourceError(
                    f"{where}: {key}", value, f"is {kind} where row {first} holds {seen}", "use one type for one key"
                )


class JsonlSource:
    """One task per line of a file; the row's keys are the task's fields."""

    def __init__(self, *, path: str, required: Sequence[str] = (), limit: int = 0) -> None:
        """`required`: keys that no row may lack (default: those of the first row). `limit`: first rows only; 0: all."""
        if limit < 0:
            raise SourceError("sources.jsonl.limit", limit, "must be >= 0", "use 0 for all rows")
        rows, self._fingerprint = load_jsonl(user_path(path), required)
        self._rows = rows[:limit] if limit else rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.jsonl", index, len(self._rows))
        return self._rows[index]

    def fingerprint(self) -> str:
        return f"{self._fingerprint}/{len(self._rows)}"
