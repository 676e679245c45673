"""wiki2hop: 1,002 questions over 6,119 Wikipedia passages, CC BY-SA 3.0 (retrieval/data/wiki2hop/SOURCE.md)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import Any

import msgspec

from astraflow.errors import SourceError
from astraflow.sources.files import load_jsonl
from astraflow.sources.splits import check_row, check_split, digest

KINDS = ("single", "comparison", "bridge", "bridge-comparison")


class _Splits(msgspec.Struct):
    heldout: set[str]
    neither: set[str]


class Wiki2HopSource:
    """Rows `{question, answers, support, kind, hops}`: accepted answers, and the ids of the passages that prove them.

    | kind              | hops | a search with the question itself finds all support among 5 | rows: train, held out |
    |-------------------|------|--------------------------------------------------------------|------------------------|
    | single            | 1    | 99 %                                                         | 150, 50                |
    | comparison        | 2    | 90 %                                                         | 236, 64                |
    | bridge            | 2    | 10 %                                                         | 287, 65                |
    | bridge-comparison | 4    | 0 %                                                          | 126, 23                |

    No passage supports questions of both splits; the one question that would is in "all" only.
    """

    def __init__(self, *, split: str = "train", kinds: Sequence[str] = KINDS, limit: int = 0) -> None:
        """`split`: train, heldout or all. `kinds`: of questions. `limit`: first rows only; 0: all."""
        split = check_split("sources.wiki2hop", split)
        if not kinds or isinstance(kinds, str) or not set(kinds) <= set(KINDS):
            raise SourceError("sources.wiki2hop.kinds", kinds, "is not known", f"give a list of: {', '.join(KINDS)}")
        if limit < 0:
            raise SourceError("sources.wiki2hop.limit", limit, "must be >= 0", "use 0 for all rows")
        place = files("astraflow.retrieval") / "data" / "wiki2hop"
        splits = msgspec.json.decode((place / "splits.json").read_bytes(), type=_Splits)
        with as_file(place / "questions.jsonl") as path:
            rows, self._content = load_jsonl(path, ("id", "question", "answers", "support"))
        rows = [row for row in rows if row["kind"] in kinds and _is_in(row["id"], split, splits)]
        self._rows = rows[:limit] if limit else rows
        self._made_from = (split, sorted(kinds))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.wiki2hop", index, len(self._rows))
        return self._rows[index]

    def fingerprint(self) -> str:
        return digest("wiki2hop", self._content, *self._made_from, len(self._rows))


def _is_in(name: str, split: str, splits: _Splits) -> bool:
    if split == "all":
        return True
    return name not in splits.neither and (name in splits.heldout) == (split == "heldout")
