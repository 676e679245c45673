"""HumanEval: 164 functions to be completed, shipped with the package (MIT licence, see data/humaneval/SOURCE.md)."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from astraflow.errors import SourceError
from astraflow.sources.files import load_jsonl
from astraflow.sources.splits import check_row

_ASK = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"


class HumanEvalSource:
    """Rows as `sources.code` says; one test each, which calls the function many times."""

    def __init__(self, *, limit: int = 0) -> None:
        """`limit`: first rows only; 0: all."""
        if limit < 0:
            raise SourceError("sources.humaneval.limit", limit, "must be >= 0", "use 0 for all rows")
        with as_file(files("astraflow.sources") / "data" / "humaneval" / "HumanEval.jsonl") as path:
            rows, self._fingerprint = load_jsonl(path)
        self._rows = rows[:limit] if limit else rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.humaneval", index, len(self._rows))
        row = self._rows[index]
        entry, prompt = row["entry_point"], row["prompt"]
        header = prompt[: prompt.rindex(f"def {entry}(")]
        return {
            "id": row["task_id"],
            "question": _ASK.format(prompt=prompt),
            "entries": [entry],
            "header": header,
            "stub": prompt,
            "setup": header,  # functions of the question that tests call: from there, never from the code
            "given": row["test"],
            "tests": [f"check({entry})"],
            "solution": prompt + row["canonical_solution"],
        }

    def fingerprint(self) -> str:
        return f"{self._fingerprint}/{len(self._rows)}"
