"""MBPP: 974 small functions to be written, shipped with the package (CC BY 4.0, see data/mbpp/SOURCE.md)."""

from __future__ import annotations

import ast
import warnings
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from astraflow.config.env import user_path
from astraflow.errors import SourceError
from astraflow.sources.files import load_jsonl
from astraflow.sources.splits import check_row

SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974), "all": (1, 974)}
_KEYS = ("task_id", "text", "code", "test_list")


class MbppSource:
    """Rows as `sources.code` says. The question shows the first `shown` tests, which name the functions; all of them
    judge."""

    def __init__(self, *, split: str = "train", shown: int = 1, path: str = "", limit: int = 0) -> None:
        """`split`: train (374 rows), validation (90), test (500), prompt (10) or all. `path`: another file with the
        same fields; all its rows are checked at once. `limit`: first rows only; 0: all."""
        if split not in SPLITS:
            raise SourceError("sources.mbpp.split", split, f"must be one of {', '.join(SPLITS)}", "train on 'train'")
        if limit < 0:
            raise SourceError("sources.mbpp.limit", limit, "must be >= 0", "use 0 for all rows")
        if shown < 1:
            raise SourceError("sources.mbpp.shown", shown, "must be >= 1", "without a test no function has a name")
        with as_file(files("astraflow.sources") / "data" / "mbpp" / "mbpp.jsonl") as shipped:
            file = user_path(path) if path else shipped
            rows, self._fingerprint = load_jsonl(file, _KEYS)
        if path:
            _check(rows, file)
        first, last = SPLITS[split]
        rows = [row for row in rows if first <= row["task_id"] <= last]
        if not rows:
            raise SourceError("sources.mbpp.path", path, f"holds no row of the split {split}", "use split = 'all'")
        self._rows, self._shown, self._split = rows[:limit] if limit else rows, shown, split
        if path:
            for index in range(len(self._rows)):
                self.row(index)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.mbpp", index, len(self._rows))
        row = self._rows[index]
        code, given, tests = (_unix(row.get(key)) for key in ("code", "test_setup_code", "test_list"))
        entries, setup = _names(code, "\n".join([given, *tests]), f"mbpp task {row['task_id']}")
        shown = "\n".join(tests[: self._shown])
        return {
            "id": row["task_id"],
            "question": f"{row['text']}\nYour code should pass tests like these:\n{shown}",
            "entries": entries,
            "header": "",
            "stub": "",
            "setup": setup,
            "given": given,
            "tests": tests,
            "solution": code,
        }

    def fingerprint(self) -> str:
        return f"{self._fingerprint}/{self._split}/{self._shown}/{len(self._rows)}"


def _check(rows: list[dict[str, Any]], file: Path) -> None:
    kinds: dict[str, Any] = {"task_id": int, "text": str, "code": str, "test_list": list, "test_setup_code": str | None}
    for number, row in enumerate(rows):
        for key, kind in kinds.items():
            value = row.get(key)
            if not isinstance(value, kind) or (kind is list and not all(isinstance(test, str) for test in value)):
                what = "a list of texts" if kind is list else "a whole number" if kind is int else "a text"
                raise SourceError(f"{file} row {number}: {key}", value, f"must be {what}", "write it as MBPP does")


def _unix(text: Any) -> Any:
    return [_unix(item) for item in text] if isinstance(text, list) else (text or "").replace("\r\n", "\n")


def _names(code: str, tests: str, where: str) -> tuple[list[str], str]:
    """What the tests take from the reference solution: functions and classes, and imports as statements.

    Raises: SourceError: one of the two is no Python, or they have no name in common."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in texts
            body, tested = ast.parse(code).body, ast.parse(tests)
    except SyntaxError as error:
        raise SourceError(where, error.msg, "is not Python", "mend `code` or `test_list`") from error
    used = {node.id for node in ast.walk(tested) if isinstance(node, ast.Name)}
    entries = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in used]
    if not entries:
        raise SourceError(where, sorted(used), "names nothing that `code` defines", "mend `code` or `test_list`")
    imports = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
    wanted = [n for n in imports if any((a.asname or a.name).split(".")[0] in used for a in n.names)]
    return entries, "\n".join(map(ast.unparse, wanted))
