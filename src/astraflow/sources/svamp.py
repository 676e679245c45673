"""SVAMP: 1,000 word problems of one step, shipped with the package (MIT licence, see data/svamp/SOURCE.md)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import msgspec

from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, check_split, digest


class _Problem(msgspec.Struct):
    ID: str
    Body: str
    Question: str
    Answer: float
    Equation: str
    Type: str


class SvampSource:
    """Rows `{question, answer, equation, kind}`: `answer` is a number as text, `kind` the operation by name.

    Problems are variations of fewer stories, and no story is on both sides: `heldout` are 200 problems, whole clusters
    of those that share half of their words (data/svamp/heldout.json).
    """

    def __init__(self, *, split: str = "train", limit: int = 0) -> None:
        """`split`: train (800 rows), heldout (200) or all. `limit`: first rows only; 0: all."""
        split = check_split("sources.svamp", split)
        if limit < 0:
            raise SourceError("sources.svamp.limit", limit, "must be >= 0", "use 0 for all rows")
        place = files("astraflow.sources") / "data" / "svamp"
        problems = msgspec.json.decode((place / "SVAMP.json").read_bytes(), type=list[_Problem])
        heldout = set(msgspec.json.decode((place / "heldout.json").read_bytes(), type=list[str]))
        rows = [problem for problem in problems if split == "all" or (problem.ID in heldout) == (split == "heldout")]
        self._rows = rows[:limit] if limit else rows
        self._split = split

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.svamp", index, len(self._rows))
        problem = self._rows[index]
        return {
            "question": f"{problem.Body.strip().rstrip('.')}. {problem.Question.strip()}",
            "answer": str(int(problem.Answer)) if problem.Answer.is_integer() else str(problem.Answer),
            "equation": problem.Equation,
            "kind": problem.Type,
        }

    def fingerprint(self) -> str:
        return digest("svamp", 1, self._split, len(self._rows))
