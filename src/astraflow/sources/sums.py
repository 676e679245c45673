"""Short sums in words, `What is 7+15?`, for a small pretrained chat model."""

from __future__ import annotations

from typing import Any

from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, check_size, check_split, digest, members, problem_at


class SumsSource:
    """Rows `{question, answer, a, b}` with 0 <= a, b <= `largest`. A fifth of all pairs is held out for good."""

    def __init__(self, *, largest: int = 20, split: str = "train", size: int = 0, seed: int = 0) -> None:
        """`size`: rows; 0: each distinct pair of the split once."""
        if not 2 <= largest <= 999:
            raise SourceError("sources.sums.largest", largest, "must be in 2..999", "use 20 for sums up to 40")
        check_size("sources.sums", size)
        self._split = check_split("sources.sums", split)
        count = (largest + 1) ** 2
        self._pairs = members(f"sums/{largest}", count, count // 5, self._split)
        self._size = size or len(self._pairs)
        self._largest, self._seed = largest, seed

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.sums", index, self._size)
        a, b = divmod(problem_at(index, self._seed, self._pairs), self._largest + 1)
        return {"question": f"What is {a}+{b}?", "answer": str(a + b), "a": a, "b": b}

    def fingerprint(self) -> str:
        return digest("sums", 1, self._largest, self._split, self._size, self._seed)
