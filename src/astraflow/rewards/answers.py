"""Short answers to questions: exact match and F1 over normalised words, of several that are accepted."""

from __future__ import annotations

from typing import ClassVar

from astraflow.retrieval.answers import accepted_of, exact_match, f1, final_answer
from astraflow.types import Outcome, Task


class ExactMatch:
    """1.0 when the answer is one of those accepted, in lower case and without accents, articles and
    punctuation.

    The answer is what stands in the last `<answer>` of the reply, else the whole reply. None when the task accepts
    nothing. `success` is exact match, also of `f1`; both say `f1`.
    """

    graded: ClassVar[str] = "exact_match"

    def __init__(self, *, field: str = "answers") -> None:
        """`field`: where the task keeps its answers, a text or a list of texts; without it, `answer`."""
        self._field = field

    def __call__(self, completion: str, task: Task) -> Outcome | None:
        accepted = accepted_of(task.fields, self._field)
        if not accepted:
            return None
        answer = final_answer(completion)
        same, alike = exact_match(answer, accepted), f1(answer, accepted)
        return Outcome(reward=same if self.graded == "exact_match" else alike, metrics={"success": same, "f1": alike})


class F1(ExactMatch):
    """F1 of the words of the answer, with the accepted one that it is most like."""

    graded: ClassVar[str] = "f1"
