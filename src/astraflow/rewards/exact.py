"""Exact match."""

from __future__ import annotations

from astraflow.types import Task


class Exact:
    """1 when the reply is the answer, else 0; None when the task has no answer to compare with."""

    def __init__(self, *, field: str = "answer", ignore_case: bool = False) -> None:
        """`field`: where the task keeps its answer. Surrounding white space never counts."""
        self._field, self._ignore_case = field, ignore_case

    def __call__(self, completion: str, task: Task) -> float | None:
        answer = task.get(self._field)
        if answer is None:
            return None
        got, wanted = completion.strip(), str(answer).strip()
        if self._ignore_case:
            got, wanted = got.casefold(), wanted.casefold()
        return float(got == wanted)
