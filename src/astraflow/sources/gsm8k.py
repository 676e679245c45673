"""GSM8K: 8,792 grade-school word problems, shipped with the package (MIT licence, see data/gsm8k/SOURCE.md)."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from astraflow.errors import SourceError
from astraflow.sources.files import load_jsonl
from astraflow.sources.splits import check_row

_MARK = "#### "


class Gsm8kSource:
    """Rows `{question, answer, solution}`: `answer` is the final number as text, `solution` the worked steps."""

    def __init__(self, *, split: str = "train", limit: int = 0) -> None:
        """`split`: train (7,473 rows) or test (1,319). `limit`: first rows only; 0: all."""
        if split not in ("train", "test"):
            raise SourceError("sources.gsm8k.split", split, "must be train or test", "evaluate on 'test'")
        if limit < 0:
            raise SourceError("sources.gsm8k.limit", limit, "must be >= 0", "use 0 for all rows")
        with as_file(files("astraflow.sources") / "data" / "gsm8k" / f"{split}.jsonl") as path:
            rows, self._fingerprint = load_jsonl(path, ("question", "answer"))
        self._rows = rows[:limit] if limit else rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.gsm8k", index, len(self._rows))
        row = self._rows[index]
        solution, _, answer = row["answer"].rpartition(_MARK)
        return {
            "question": row["question"],
            "answer": answer.strip().replace(",", ""),
            "solution": solution.strip(),
        }

    def fingerprint(self) -> str:
        return f"{self._fingerprint}/{len(self._rows)}"
