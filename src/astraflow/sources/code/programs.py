"""Problems of programming contests from a file of yours: LiveCodeBench, APPS, TACO and what has their form."""

from __future__ import annotations

import json
import keyword
from typing import Any

from astraflow.config.env import user_path
from astraflow.errors import SourceError
from astraflow.sources.files import load_jsonl
from astraflow.sources.splits import check_row

_SAME = """
def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def same(got, *wanted):
    return _plain(got) in map(_plain, wanted)


inf, nan = float("inf"), float("nan")
"""


class ProgramsSource:
    """Rows as `sources.code` says, from JSON Lines.

    Tests in one field, an object or JSON text of one: `{"inputs": [...], "outputs": [...], "fn_name": ...}`, or a list
    of `{"input": ..., "output": ...}`. With a name of a function, each input is the
    list of its arguments, or one JSON value a line; the function, or `Solution().function`, returns the output, which
    APPS may write as a list of one. Without a name, inputs and outputs are texts of whole programs.
    """

    def __init__(
        self, *, path: str, question: str = "question", tests: str = "input_output", starter: str = "starter_code",
        function: str = "fn_name", max_cases: int = 20, limit: int = 0,
    ) -> None:  # fmt: skip
        """`question`, `tests`, `starter`, `function`: names of fields. `starter` and `function` may lack; `function` is
        looked for in the row, in the tests, and in JSON of the field `metadata`. `max_cases`: the first ones only."""
        if max_cases < 1 or limit < 0:
            name, value = ("max_cases", max_cases) if max_cases < 1 else ("limit", limit)
            raise SourceError(f"sources.programs.{name}", value, "is too small", "use max_cases >= 1 and limit >= 0")
        rows, self._fingerprint = load_jsonl(user_path(path), (question, tests))
        rows = rows[:limit] if limit else rows
        names = question, tests, starter, function
        self._rows = [_row(row, f"{path} row {number}", names, max_cases) for number, row in enumerate(rows)]
        self._max_cases = max_cases

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.programs", index, len(self._rows))
        return self._rows[index]

    def fingerprint(self) -> str:
        return f"{self._fingerprint}/{len(self._rows)}/{self._max_cases}"


def _row(row: dict[str, Any], where: str, names: tuple[str, str, str, str], max_cases: int) -> dict[str, Any]:
    question, tests, starter, function = names
    found = _json(row[tests], f"{where}: {tests}")
    pairs, inside = _pairs(found, f"{where}: {tests}")
    name = row.get(function) or inside or _of_metadata(row, function)
    made: dict[str, Any] = {
        "id": row.get("question_id", row.get("id", where)), "question": row[question], "header": "", "stub": "",
        "setup": "", "given": "", "entries": [], "tests": [], "cases": [], "solution": "",
    }  # fmt: skip
    if row.get(starter):
        made["question"] += f"\n\n```python\n{row[starter]}\n```"
    if name:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise SourceError(f"{where}: {function}", name, "is no name of a function", "write one, or leave it out")
        made |= {"entries": [name], "setup": _SAME}
        made["tests"] = [_call(name, given, wanted, f"{where}: {tests}") for given, wanted in pairs[:max_cases]]
    else:
        made["cases"] = [[_text(part, f"{where}: {tests}") for part in pair] for pair in pairs[:max_cases]]
    return made


def _pairs(found: Any, where: str) -> tuple[list[tuple[Any, Any]], Any]:
    """(input, output) of each case, and the name of the function, "" if none."""
    if isinstance(found, list) and found and all(isinstance(c, dict) and {"input", "output"} <= set(c) for c in found):
        return [(case["input"], case["output"]) for case in found], ""
    if isinstance(found, dict):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs):
            return list(zip(inputs, outputs, strict=True)), found.get("fn_name") or ""
    raise SourceError(
        where, str(found)[:80], "holds no cases",
        'write {"inputs": [...], "outputs": [...]} of equal length, or [{"input": ..., "output": ...}]',
    )  # fmt: skip


def _call(name: str, given: Any, wanted: Any, where: str) -> str:
    """A test that calls the function. Text is JSON, one value a line."""
    if isinstance(given, str):
        args = [_json(line, where) for line in given.splitlines() if line.strip()]
    else:
        args = given if isinstance(given, list) else [given]
    wanted = [_json(wanted, where) if isinstance(wanted, str) and isinstance(given, str) else wanted]
    if not isinstance(given, str) and isinstance(wanted[0], list) and len(wanted[0]) == 1:
        wanted.append(wanted[0][0])
    return f"assert same({name}(*{args!r}), {', '.join(map(repr, wanted))})"


def _of_metadata(row: dict[str, Any], function: str) -> Any:
    found = row.get("metadata")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return ""
    name = found.get(function, found.get("func_name")) if isinstance(found, dict) else None
    return name or ""


def _text(value: Any, where: str) -> str:
    if value is None:
        raise SourceError(where, None, "is neither an input nor an output", "write a text; one may be empty")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SourceError(where, value[:80], f"is not JSON ({error})", "write the cases as JSON") from error
