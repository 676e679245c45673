"""Computer algebra, in a process of its own (`processes.pool`): math-verify can take for ever."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Literal

Said = Literal["right", "wrong", "gold"]
_WARM = (
    ("\\frac{1}{2}", "0.5"), ("x^2+2x+1", "(x+1)^2"), ("(1,2)", "(1, 3)"), ("\\{1,2\\}", "2,1"), ("1<x<2", "(1,2)"),
    ("\\sqrt{8}", "2\\sqrt{2}"), ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
)  # fmt: skip
"""Each kind of answer takes up to 0.2 s the first time."""


class Verifier:
    """Only LaTeX is read. Plain expressions go through `eval` in sympy, and what a model wrote must not."""

    def __init__(self) -> None:
        import math_verify

        sys.set_int_max_str_digits(100_000)
        self._library: Any = math_verify
        self._config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
        self._gold = lru_cache(4096)(self._parsed)
        for gold, answer in _WARM:
            self.verify(gold, answer)

    def verify(self, gold: str, answer: str) -> Said:
        """ "gold": the right answer itself cannot be read. Not symmetric: an interval answers an inequality, but an
        inequality does not answer an interval. Raises: whatever the algebra does."""
        wanted = self._gold(gold)
        if not wanted:
            return "gold"
        got = self._parsed(answer)
        right = bool(got) and self._library.verify(
            wanted, got, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
        )
        return "right" if right else "wrong"

    def _parsed(self, text: str) -> list[Any]:
        found: list[Any] = self._library.parse(
            f"\\boxed{{{text}}}", extraction_config=self._config, fallback_mode="no_fallback", parsing_timeout=None,
            raise_on_error=True,
        )  # fmt: skip
        return found
